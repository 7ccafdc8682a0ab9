"""The implementations that are timed side by side, each called as its users call it.

Every one gets the layout it is made for: FlashAttention-3 and -4 (batch, seqlen, nheads, head_dim), all others
(batch, nheads, seqlen, head_dim); the numbers in the tensors are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

import flashgen
from benchmarks import fa2, fa4
from benchmarks.flex import compiled_flex, flex_call, forget_compiled
from benchmarks.masks import dense_mask
from flashgen.core.features.values import Features
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.measure import baselines
from flashgen.measure.inputs import Inputs

FA3_MODULE, FA3_CONFIG, FA3_PACKAGE = "fa3_fwd_interface", "fa3_fwd_config", "fa3_fwd"
FA3_MAX_HEAD_DIM = 256

STANDARD_LIMIT_BYTES = 64 * 2**30
"""What standard attention may take for its scores and probabilities."""

STANDARD_SHARE = 1 / 3
"""It is many times slower, so shorter windows tell as much."""


Results = torch.Tensor | tuple[torch.Tensor, ...]


def results_of(found: Results) -> tuple[torch.Tensor, ...]:
    """What a call returned, as a tuple in any case."""
    return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One workload made ready: `run(n)` launches on the n-th inputs and returns the output, viewed as bhsd.

    A backward pass returns (dq, dk, dv), and one that begins with its forward pass (dq, dk, dv, out).
    `held_bytes` are those of tensors that it had to build beside the inputs, such as a mask for a window.
    """

    run: Callable[[int], Results]
    held_bytes: int = 0
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation. `share` is the length of its windows relative to the others'.

    Where it has `variants`, the fastest of them races in its place, under its name and with a version of its own.
    """

    name: str
    version: Callable[[], str]
    unsupported: Callable[[Workload], str | None]
    prepare: Callable[[Workload, Inputs], Call]
    share: float = 1.0
    variants: Variants | None = None


class Variants(Protocol):
    """Ways to call one implementation, of which a race enters the fastest."""

    def next(self, workload: Workload, seen: Mapping[str, float]) -> Impl | None:
        """The one to try next, or None.

        Args:
            workload: what is raced.
            seen: those that were tried, by version: ms per call, infinite for one that failed.
        """
        ...


def _none(workload: Workload) -> None:
    return None


def _flashgen(workload: Workload, inputs: Inputs) -> Call:
    q, k, v, causal, features = inputs.q, inputs.k, inputs.v, workload.causal, inputs.features
    features = [flashgen_features(each) for each in features]

    def run(n: int) -> torch.Tensor:
        out = flashgen.attention(q[n], k[n], v[n], causal=causal, **features[n])
        assert isinstance(out, torch.Tensor)
        return out

    return Call(run=run)


def flashgen_features(features: Features) -> dict[str, Any]:
    """The keyword arguments of `flashgen.attention` that an `Features` stands for; empty for a plain call."""
    given: dict[str, Any] = {
        name: value
        for name in ("alibi_slopes", "sinks", "bias", "mask")
        if (value := getattr(features, name)) is not None
    }
    if features.window != (None, None):
        given["window"] = features.window
    if features.softcap:
        given["softcap"] = features.softcap
    return given


def _sdpa(impl: str, workload: Workload, inputs: Inputs) -> Call:
    call = baselines.sdpa_call(impl, workload)
    return Call(run=lambda n: call.run(inputs.q[n], inputs.k[n], inputs.v[n], inputs.features[n]), context=call.context)


FLEX_BIAS_ELEMENTS = 2**31
"""Its kernels index a captured tensor with 32 bits: a larger one ends in an illegal access (seen with torch 2.11)."""


def _why_not_flex(workload: Workload) -> str | None:
    elements = workload.nheads * workload.seqlen_q * workload.seqlen_k
    if workload.bias == "full" and elements >= FLEX_BIAS_ELEMENTS:
        return f"a bias of {elements} elements is beyond its 32-bit indices"
    return None


def _flex(workload: Workload, inputs: Inputs) -> Call:
    forget_compiled()
    return Call(run=flex_call(compiled_flex(), workload, inputs))


def _why_not_sdpa_masked(workload: Workload) -> str | None:
    if workload.softcap or workload.sink or workload.varlen:
        return "scaled_dot_product_attention has no softcap, sinks or varlen"
    if not (workload.specialization.window or workload.alibi or workload.bias or workload.mask):
        return "there is nothing that needs a mask"
    return None


def _fa2(workload: Workload, inputs: Inputs) -> Call:
    return Call(run=fa2.op_call(workload, inputs)) if fa2.needs_op(workload) else _sdpa(fa2.IMPL, workload, inputs)


def _sdpa_masked(workload: Workload, inputs: Inputs) -> Call:
    """`scaled_dot_product_attention` with what it needs in one mask, on the backend that torch chooses."""
    mask, held = dense_mask(workload, inputs)
    gqa = workload.nheads != workload.nheads_k

    def run(n: int) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q[n], inputs.k[n], inputs.v[n], attn_mask=mask, enable_gqa=gqa
        )

    return Call(run=run, held_bytes=held)


def _why_not_fa3(workload: Workload) -> str | None:
    if importlib.util.find_spec(FA3_MODULE) is None:
        return f"{FA3_MODULE} is not installed"
    if any((workload.alibi, workload.sink, workload.bias, workload.mask)):
        return "FlashAttention-3 has no ALiBi, sinks, bias or mask"
    if max(workload.head_dim, workload.head_dim_v) > FA3_MAX_HEAD_DIM:
        return f"its head_dim ends at {FA3_MAX_HEAD_DIM}"
    if workload.dtype not in ("bf16", "fp16") or (workload.dtype == "fp16" and fa3_lacks("FP16")):
        return f"this build does not compute in {workload.dtype}"
    if workload.softcap and fa3_lacks("SOFTCAP"):
        return "this build has no softcap"
    return "this build has no windows" if _window_hides(workload) and fa3_lacks("LOCAL") else None


def fa3_lacks(part: str) -> bool:
    """Whether the installed build left this part out to be smaller; one without a list of its parts has them all."""
    try:
        flags = importlib.import_module(FA3_CONFIG).CONFIG["build_flags"]
    except ModuleNotFoundError:
        return False
    return bool(flags.get(f"FLASHATTENTION_DISABLE_{part}", False))


def _window_hides(workload: Workload) -> bool:
    """Whether the window hides a key that a causal mask leaves visible; if not, FlashAttention drops it."""
    without = replace(workload, window_left=None, window_right=None)
    return workload.visible_pairs < without.visible_pairs


def fa3_function() -> Callable[..., Any]:
    """`flash_attn_func(q, k, v, causal=)` of FlashAttention-3, for tensors in bshd order."""
    function: Callable[..., Any] = importlib.import_module(FA3_MODULE).flash_attn_func
    return function


def _fa3(workload: Workload, inputs: Inputs) -> Call:
    function, causal = fa3_function(), workload.causal
    options: dict[str, Any] = {}
    if workload.specialization.window:
        edges = (workload.window_left, 0 if causal else workload.window_right)
        options["window_size"] = tuple(-1 if edge is None else edge for edge in edges)
    if workload.softcap:
        options["softcap"] = inputs.features[0].softcap
    q, k, v = (tuple(t.transpose(1, 2).contiguous() for t in group) for group in (inputs.q, inputs.k, inputs.v))

    def run(n: int) -> torch.Tensor:
        out = function(q[n], k[n], v[n], causal=causal, **options)
        out = out[0] if isinstance(out, tuple) else out
        view: torch.Tensor = out.transpose(1, 2)
        return view

    return Call(run=run)


def _fa4(workload: Workload, inputs: Inputs) -> Call:
    options = fa4.feature_options(workload, inputs.features[0])
    return Call(run=fa4.forward(inputs.q, inputs.k, inputs.v, causal=workload.causal, **options))


def standard_bytes(workload: Workload) -> int:
    """Bytes that standard attention holds at once: scores and probabilities, backward also the gradients of both."""
    pairs = workload.batch * workload.nheads * workload.seqlen_q * workload.seqlen_k
    matrices = 2 if workload.direction == "forward" else 4
    return matrices * pairs * DTYPE_BYTES[workload.dtype]


def _why_not_standard(workload: Workload) -> str | None:
    if (
        any((workload.softcap, workload.alibi, workload.sink, workload.bias, workload.mask))
        or workload.specialization.window
    ):
        return "it is here as the textbook's attention, without features"
    needed = standard_bytes(workload)
    if needed > STANDARD_LIMIT_BYTES:
        what = "scores and probabilities" if workload.direction == "forward" else "scores, probabilities and gradients"
        return f"its {what} take {needed / 2**30:.0f} GiB, the limit is {STANDARD_LIMIT_BYTES >> 30} GiB"
    return None


def _standard(workload: Workload, inputs: Inputs) -> Call:
    mask = standard_mask(workload, inputs)
    return Call(run=lambda n: standard_attention(inputs.q[n], inputs.k[n], inputs.v[n], mask))


def standard_mask(workload: Workload, inputs: Inputs) -> torch.Tensor | None:
    """What a causal mask hides, (seqlen_q, seqlen_k); None without one."""
    if not workload.causal:
        return None
    ones = torch.ones(workload.seqlen_q, workload.seqlen_k, dtype=torch.bool, device=inputs.q[0].device)
    return ones.triu_(workload.seqlen_k - workload.seqlen_q + 1)


def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Two matrix products with a softmax between them, all scores in memory; as few passes over them as torch has."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def torch_version() -> str:
    """The torch of this process."""
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
    Impl(name="flashgen", version=lambda: flashgen.__version__, unsupported=_none, prepare=_flashgen),
    Impl(name="sdpa-flash", version=torch_version, unsupported=fa2.unsupported, prepare=_fa2),
    Impl(
        name="sdpa-cudnn",
        version=cudnn_version,
        unsupported=partial(baselines.unsupported, "sdpa-cudnn"),
        prepare=partial(_sdpa, "sdpa-cudnn"),
    ),
    Impl(name="sdpa-masked", version=torch_version, unsupported=_why_not_sdpa_masked, prepare=_sdpa_masked),
    Impl(name="flex", version=torch_version, unsupported=_why_not_flex, prepare=_flex),
    Impl(name="fa3", version=fa3_version, unsupported=_why_not_fa3, prepare=_fa3),
    Impl(name="fa4", version=fa4.version, unsupported=fa4.unsupported, prepare=_fa4),
    Impl(
        name="standard",
        version=torch_version,
        unsupported=_why_not_standard,
        prepare=_standard,
        share=STANDARD_SHARE,
    ),
)

EFFICIENT = Impl(
    name="sdpa-efficient",
    version=torch_version,
    unsupported=partial(baselines.unsupported, "sdpa-efficient"),
    prepare=partial(_sdpa, "sdpa-efficient"),
)
"""The fastest of torch's kernels in float32 alone, so it races where there is such a workload."""
