"""The implementations that are timed side by side, each called as its users call it.

Every one gets the layout it is made for: FlashAttention-3 (batch, seqlen, nheads, head_dim), all others
(batch, nheads, seqlen, head_dim); the numbers in the tensors are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import flashgen
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.measure import anchors
from flashgen.measure.inputs import Inputs

FA3_MODULE, FA3_PACKAGE = "fa3_fwd_interface", "fa3_fwd"

STANDARD_LIMIT_BYTES = 64 * 2**30
"""What standard attention may take for its scores and probabilities."""

STANDARD_SHARE = 1 / 3
"""It is many times slower, so shorter windows tell as much."""

COMPILE_LIMIT = 4096
"""torch gives up compiling after a few shapes of one function; a benchmark has many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One workload made ready: `run(n)` launches on the n-th inputs and returns the output, viewed as bhsd."""

    run: Callable[[int], torch.Tensor]
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation. `share` is the length of its windows relative to the others'."""

    name: str
    version: Callable[[], str]
    why_not: Callable[[Workload], str | None]
    prepare: Callable[[Workload, Inputs], Call]
    share: float = 1.0


def _none(workload: Workload) -> None:
    return None


def _flashgen(workload: Workload, inputs: Inputs) -> Call:
    q, k, v, causal = inputs.q, inputs.k, inputs.v, workload.causal

    def run(n: int) -> torch.Tensor:
        out = flashgen.attention(q[n], k[n], v[n], causal=causal)
        assert isinstance(out, torch.Tensor)
        return out

    return Call(run=run)


def _sdpa(impl: str, workload: Workload, inputs: Inputs) -> Call:
    call = anchors.sdpa_call(impl, workload)
    return Call(run=lambda n: call.run(inputs.q[n], inputs.k[n], inputs.v[n]), context=call.context)


def _flex(workload: Workload, inputs: Inputs) -> Call:
    """FlexAttention compiled for exactly this shape, which is the most favourable way to use it."""
    flex_attention = flex_module().flex_attention
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = COMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = COMPILE_LIMIT
    compiled = torch.compile(flex_attention, dynamic=False)
    return flex_call(compiled, workload, inputs)


def flex_call(function: Callable[..., Any], workload: Workload, inputs: Inputs) -> Call:
    """`function` is `flex_attention`, compiled or not; a causal mask is a block mask, which skips hidden blocks."""
    q, k, v = inputs.q, inputs.k, inputs.v
    mask = None
    if workload.causal:
        lengths = (workload.seqlen_q, workload.seqlen_k)
        mask = flex_module().create_block_mask(
            _visible(lengths[1] - lengths[0]), None, None, *lengths, device=q[0].device
        )
    gqa = workload.nheads != workload.nheads_k
    return Call(run=lambda n: function(q[n], k[n], v[n], block_mask=mask, enable_gqa=gqa))


def _visible(offset: int) -> Callable[..., torch.Tensor]:
    """The causal mask as FlexAttention's examples write it, and with an offset only where there is one."""

    def causal(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i >= j

    def bottom_right(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i + offset >= j

    return bottom_right if offset else causal


def flex_module() -> Any:
    """Imported late: it takes a second."""
    return importlib.import_module("torch.nn.attention.flex_attention")


def _why_not_fa3(workload: Workload) -> str | None:
    if importlib.util.find_spec(FA3_MODULE) is None:
        return f"{FA3_MODULE} is not installed"
    return None if workload.dtype == "bf16" else f"this build computes in bf16, not {workload.dtype}"


def fa3_function() -> Callable[..., Any]:
    """`flash_attn_func(q, k, v, causal=)` of FlashAttention-3, for tensors in bshd order."""
    function: Callable[..., Any] = importlib.import_module(FA3_MODULE).flash_attn_func
    return function


def _fa3(workload: Workload, inputs: Inputs) -> Call:
    function, causal = fa3_function(), workload.causal
    q, k, v = (tuple(t.transpose(1, 2).contiguous() for t in group) for group in (inputs.q, inputs.k, inputs.v))

    def run(n: int) -> torch.Tensor:
        out = function(q[n], k[n], v[n], causal=causal)
        out = out[0] if isinstance(out, tuple) else out
        view: torch.Tensor = out.transpose(1, 2)
        return view

    return Call(run=run)


def standard_bytes(workload: Workload) -> int:
    """Bytes that standard attention holds at once: the scores and the probabilities."""
    pairs = workload.batch * workload.nheads * workload.seqlen_q * workload.seqlen_k
    return 2 * pairs * DTYPE_BYTES[workload.dtype]


def _why_not_standard(workload: Workload) -> str | None:
    needed = standard_bytes(workload)
    if needed > STANDARD_LIMIT_BYTES:
        return (
            f"its scores and probabilities take {needed / 2**30:.0f} GiB, the limit is {STANDARD_LIMIT_BYTES >> 30} GiB"
        )
    return None


def _standard(workload: Workload, inputs: Inputs) -> Call:
    mask = None
    if workload.causal:
        ones = torch.ones(workload.seqlen_q, workload.seqlen_k, dtype=torch.bool, device=inputs.q[0].device)
        mask = ones.triu_(workload.seqlen_k - workload.seqlen_q + 1)
    return Call(run=lambda n: standard_attention(inputs.q[n], inputs.k[n], inputs.v[n], mask))


def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Two matrix products with a softmax between them, all scores in memory; as few passes over them as torch has."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def _torch_version() -> str:
    return torch.__version__


def cudnn_version() -> str:
    """The cuDNN that torch uses, e.g. 9.19.0."""
    number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return "" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def fa3_version() -> str:
    """The installed FlashAttention-3, empty where there is none."""
    try:
        return importlib.metadata.version(FA3_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


IMPLS: tuple[Impl, ...] = (
    Impl(name="flashgen", version=lambda: flashgen.__version__, why_not=_none, prepare=_flashgen),
    Impl(
        name="sdpa-flash",
        version=_torch_version,
        why_not=partial(anchors.why_not, "sdpa-flash"),
        prepare=partial(_sdpa, "sdpa-flash"),
    ),
    Impl(
        name="sdpa-cudnn",
        version=cudnn_version,
        why_not=partial(anchors.why_not, "sdpa-cudnn"),
        prepare=partial(_sdpa, "sdpa-cudnn"),
    ),
    Impl(name="flex", version=_torch_version, why_not=_none, prepare=_flex),
    Impl(name="fa3", version=fa3_version, why_not=_why_not_fa3, prepare=_fa3),
    Impl(
        name="standard",
        version=_torch_version,
        why_not=_why_not_standard,
        prepare=_standard,
        share=STANDARD_SHARE,
    ),
)
