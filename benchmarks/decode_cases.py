"""The steps of decoding that are raced, their caches, and how each implementation is called on them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen
from benchmarks import fa4
from benchmarks.decode_vllm import vllm_call, vllm_version, why_not_vllm
from benchmarks.impls import FA3_MODULE, Call, cudnn_version, fa3_lacks, fa3_version, torch_version
from flashgen.core.lengths import RAMP, SAME, TAIL
from flashgen.core.workload import Workload

ROTATED_BYTES = 256 * 2**20
MOST_COPIES = 32
FIXED_SPLIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of decoding: a workload of one or a few queries with a profile of lengths."""

    workload: Workload

    @property
    def suite(self) -> str:
        """The suite that its rows are of."""
        return MORE_SUITE if self in MORE else SUITE

    @property
    def profile(self) -> str:
        """The name of the profile of its lengths."""
        return self.workload.lengths

    @property
    def lens(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.workload.each_length

    @property
    def bytes(self) -> int:
        """Fewest bytes of keys and values that a call reads."""
        return self.workload.cache_bytes

    @property
    def copies(self) -> int:
        """Sets of caches to rotate, so that no call finds its keys in the L2 cache."""
        return min(MOST_COPIES, max(1, -(-ROTATED_BYTES // self.bytes)))


def _step(text: str, profile: str = SAME) -> Step:
    return Step(workload=Workload.parse(f"dec-{text}-{profile}"))


SUITE, MORE_SUITE = "decode", "decode_more"
LLAMA = "h32-hk8-sq1-d128"
GPT_OSS = "h64-hk8-sq1-d64-sink"
MISTRAL = f"{LLAMA}-wl4095"

GRID: tuple[Step, ...] = (
    *(_step(f"b1-sk{keys}-{LLAMA}") for keys in (1024, 8192, 32768, 131072)),
    *(_step(f"b{batch}-sk{keys}-{LLAMA}") for batch, keys in ((16, 1024), (16, 8192), (64, 1024), (64, 4096))),
    *(_step(f"b{batch}-sk32768-{LLAMA}") for batch in (16, 64)),
    *(
        _step(f"b{batch}-sk{keys}-{LLAMA}-page{page}")
        for page in (64, 16)
        for batch, keys in ((1, 8192), (16, 1024), (16, 8192), (64, 4096))
    ),
    *(_step(f"b64-sk8192-{LLAMA}{pages}", RAMP) for pages in ("", "-page64", "-page16")),
    *(_step(f"b64-sk65536-{LLAMA}{pages}", TAIL) for pages in ("", "-page16")),
    *(_step(f"b{batch}-sk8192-{GPT_OSS}{pages}") for batch in (1, 64) for pages in ("", "-page16")),
    *(_step(f"b64-sk8192-{GPT_OSS}-wl127{pages}") for pages in ("", "-page16")),
    *(_step(f"b16-sk8192-h32-hk8-sq{rows}-d128-causal-page64") for rows in (4, 8, 16)),
)
"""Llama-3.1's heads over lengths, batches and pages, ragged batches, gpt-oss's two kinds of layers, and speculation."""

MORE: tuple[Step, ...] = (
    *(_step(f"b{batch}-sk32768-{LLAMA}-page{page}") for page in (64, 16) for batch in (16, 64)),
    *(_step(f"b64-sk8192-{MISTRAL}{pages}", RAMP) for pages in ("", "-page16")),
    *(_step(f"b{batch}-sk8192-h64-hk8-sq1-d64") for batch in (1, 64)),
    *(_step(f"b16-sk8192-h32-hk8-sq{rows}-d128-causal") for rows in (4, 8, 16)),
)
"""Large caches in pages, ragged batches with a window, and what more peers have: gpt-oss's heads without sinks, and
speculation over contiguous caches."""

STEPS = (*GRID, *MORE)


@dataclass(frozen=True, kw_only=True)
class Caches:
    """A step's tensors, a set for each copy; `lens` and the page tables are the same in all."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    lens: torch.Tensor
    table: torch.Tensor | None
    sinks: torch.Tensor | None


def caches(step: Step, device: torch.device) -> Caches:
    """Normal random numbers in bfloat16; pages lie in random order."""
    w, lens = step.workload, step.lens
    shape, table = (w.batch, w.seqlen_k), None
    if w.page_size is not None:
        counts = [-(-n // w.page_size) for n in lens]
        shape, order = (sum(counts), w.page_size), torch.randperm(sum(counts), dtype=torch.int32)
        table = torch.full((w.batch, max(counts)), -1, dtype=torch.int32)
        for b, part in enumerate(order.split(counts)):
            table[b, : len(part)] = part

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    return Caches(
        q=[normal(w.batch, w.seqlen_q, w.nheads, w.head_dim) for _ in range(step.copies)],
        k=[normal(*shape, w.nheads_k, w.head_dim) for _ in range(step.copies)],
        v=[normal(*shape, w.nheads_k, w.head_dim_v) for _ in range(step.copies)],
        lens=torch.tensor(lens, dtype=torch.int32, device=device),
        table=None if table is None else table.to(device),
        sinks=torch.randn(w.nheads, device=device) if w.sink else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeImpl:
    """An implementation: why it cannot run a step, or None, and a call of it on the n-th set of a step's caches."""

    name: str
    version: Callable[[], str]
    unsupported: Callable[[Step], str | None]
    prepare: Callable[[Step, Caches], Call]


def flashgen_options(step: Step, found: Caches) -> dict[str, Any]:
    """The keyword arguments of `flashgen.attention_decode` for a step."""
    given: dict[str, Any] = {"block_table": found.table, "causal": step.workload.causal, "sinks": found.sinks}
    if step.workload.window_left is not None:
        given["window"] = (step.workload.window_left, 0)
    return given


def _flashgen(step: Step, found: Caches, **options: Any) -> Call:
    given = flashgen_options(step, found) | options
    return Call(run=lambda n: flashgen.attention_decode(found.q[n], found.k[n], found.v[n], found.lens, **given))


def _everything(step: Step) -> str | None:
    return None


def _long_enough(step: Step) -> str | None:
    return None if step.workload.seqlen_k > FIXED_SPLIT else f"no sequence is longer than a split of {FIXED_SPLIT}"


def _why_not_sdpa(step: Step) -> str | None:
    w = step.workload
    if w.page_size is not None or step.profile != SAME:
        return "scaled_dot_product_attention has no pages and no lengths"
    if w.sink or w.window_left is not None or w.seqlen_q > 1:
        return "scaled_dot_product_attention has no sinks, windows or masks aligned to the last key"
    return None


def _sdpa(backend: SDPBackend, step: Step, found: Caches) -> Call:
    views = [[t.transpose(1, 2) for t in one] for one in zip(found.q, found.k, found.v, strict=True)]
    gqa = step.workload.nheads != step.workload.nheads_k

    def run(n: int) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(*views[n], enable_gqa=gqa)
        return out.transpose(1, 2)

    return Call(run=run, context=lambda: sdpa_kernel(backend))


def _why_not_fa3(step: Step) -> str | None:
    if importlib.util.find_spec(FA3_MODULE) is None:
        return f"{FA3_MODULE} is not installed"
    if not hasattr(importlib.import_module(FA3_MODULE), "flash_attn_with_kvcache"):
        return "this build has no function for caches"
    if step.workload.sink:
        return "FlashAttention-3 has no sinks"
    if step.workload.window_left is not None and fa3_lacks("LOCAL"):
        return "this build has no windows"
    return None


def _fa3(step: Step, found: Caches) -> Call:
    """Without lengths where all caches are full, as SDPA is called: it is faster then."""
    function, w = importlib.import_module(FA3_MODULE).flash_attn_with_kvcache, step.workload
    options: dict[str, Any] = {"causal": w.causal}
    if found.table is not None:
        options["page_table"] = found.table
    if found.table is not None or step.profile != SAME:
        options["cache_seqlens"] = found.lens
    if w.window_left is not None:
        options["window_size"] = (w.window_left, 0)

    def run(n: int) -> torch.Tensor:
        out = function(found.q[n], found.k[n], found.v[n], **options)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return Call(run=run, context=contextlib.nullcontext)


def _why_not_fa4(step: Step) -> str | None:
    return fa4.limits(step.workload)


def _fa4(step: Step, found: Caches) -> Call:
    function, w = importlib.import_module(fa4.MODULE).flash_attn_varlen_func, step.workload
    options: dict[str, Any] = {"seqused_k": found.lens, "causal": w.causal, "page_table": found.table}
    options["learnable_sink"] = found.sinks
    if w.window_left is not None:
        options["window_size"] = (w.window_left, 0)

    def run(n: int) -> torch.Tensor:
        out: torch.Tensor = function(found.q[n], found.k[n], found.v[n], **options)[0]
        return out

    return Call(run=run)


IMPLS: tuple[DecodeImpl, ...] = (
    DecodeImpl(name="flashgen", version=lambda: flashgen.__version__, unsupported=_everything, prepare=_flashgen),
    DecodeImpl(
        name="flashgen-fixed",
        version=lambda: flashgen.__version__,
        unsupported=_long_enough,
        prepare=partial(_flashgen, fixed_split_size=FIXED_SPLIT),
    ),
    DecodeImpl(
        name="sdpa-cudnn",
        version=cudnn_version,
        unsupported=_why_not_sdpa,
        prepare=partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    ),
    DecodeImpl(
        name="sdpa-flash",
        version=torch_version,
        unsupported=_why_not_sdpa,
        prepare=partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    ),
    DecodeImpl(name="fa3", version=fa3_version, unsupported=_why_not_fa3, prepare=_fa3),
    DecodeImpl(name="fa4", version=fa4.version, unsupported=_why_not_fa4, prepare=_fa4),
    DecodeImpl(name="vllm", version=vllm_version, unsupported=why_not_vllm, prepare=vllm_call),
)
