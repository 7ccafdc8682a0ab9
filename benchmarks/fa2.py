"""FlashAttention-2 as torch carries it: `scaled_dot_product_attention` with this backend alone, or the op below it.

SDPA has no argument for a window or for ALiBi. The op that its backend calls has both; a build may leave them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure import baselines
from flashgen.measure.inputs import Inputs

IMPL = "sdpa-flash"
MAX_HEAD_DIM = 256

UNSUPPORTED = "FlashAttention-2 as torch calls it has no softcap, sinks, bias, mask or varlen"


def needs_op(workload: Workload) -> bool:
    """Whether a workload has a feature that only the op has an argument for."""
    return workload.specialization.window or workload.alibi


def unsupported(workload: Workload) -> str | None:
    """Why it is not asked for this workload, or None; whether the build has ALiBi is seen by running it."""
    if not needs_op(workload):
        return baselines.unsupported(IMPL, workload)
    w = workload
    if w.direction != "forward":
        return "a backward pass is timed without features here"
    if any((w.softcap, w.sink, w.bias, w.mask, w.varlen)):
        return UNSUPPORTED
    if w.head_dim != w.head_dim_v:
        return "the op takes one head_dim for q, k and v"
    if w.head_dim > MAX_HEAD_DIM:
        return f"its head_dim ends at {MAX_HEAD_DIM}"
    return None if w.dtype in ("bf16", "fp16") else f"it computes in bf16 and fp16, not {w.dtype}"


def op_call(workload: Workload, inputs: Inputs) -> Callable[[int], torch.Tensor]:
    """The op on the n-th inputs, in its own layout (batch, seqlen, nheads, head_dim)."""
    q, k, v = (tuple(t.transpose(1, 2).contiguous() for t in group) for group in (inputs.q, inputs.k, inputs.v))
    options = [op_options(workload, features) for features in inputs.features]
    op, lengths, causal = flash_op(), (workload.seqlen_q, workload.seqlen_k), workload.causal

    def run(n: int) -> torch.Tensor:
        found = op(q[n], k[n], v[n], None, None, *lengths, 0.0, causal, False, **options[n])
        out: torch.Tensor = found[0].transpose(1, 2)
        return out

    return run


def flash_op() -> Callable[..., Any]:
    """Torch's op: q, k, v, lengths of packed sequences (none), lengths, dropout, causal, debug; options by name."""
    op: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    return op


def op_options(workload: Workload, features: Features) -> dict[str, Any]:
    """The op's arguments for a window and for ALiBi; empty where a workload has neither."""
    given: dict[str, Any] = {}
    if workload.specialization.window:
        edges = (workload.window_left, 0 if workload.causal else workload.window_right)
        given |= dict(zip(("window_size_left", "window_size_right"), edges, strict=True))
    if features.alibi_slopes is not None:
        given["alibi_slopes"] = features.alibi_slopes
    return {name: value for name, value in given.items() if value is not None}
