"""The public calls: `attention`, `explain`, `warmup`, `reload`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, overload

import torch

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime import ops, serve

if TYPE_CHECKING:
    from flashgen.runtime.dispatch import Explanation

LAYOUTS = ("bhsd", "bshd")
Window = tuple[int | None, int | None]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = ...,
    causal: bool = ...,
    q_offset: int | torch.Tensor | None = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = ...,
    causal: bool = ...,
    q_offset: int | torch.Tensor | None = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = ...,
    causal: bool = ...,
    q_offset: int | torch.Tensor | None = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, `softmax(scale * q k^T) v`, by the best kernel known for this GPU and these shapes.

    Any strides are taken without a copy, as long as the last dimension is contiguous. The forward kernels are
    deterministic. A row that sees no key has output 0 and LSE -inf.

    Args:
        q: queries, (batch, nheads, seqlen_q, head_dim), or (batch, seqlen_q, nheads, head_dim) with layout "bshd";
            bfloat16, float16 or float32 on a GPU.
        k: keys, like q with nheads_k heads and seqlen_k; nheads must be a multiple of nheads_k (GQA, MQA).
        v: values, like k with head_dim_v.
        layout: "bhsd" (torch) or "bshd" (flash-attn).
        causal: key j is visible to query i iff `j <= i + q_offset`.
        q_offset: position of the first query among the keys: an int, or an int32 tensor (batch,) on the GPU; None is
            seqlen_k - seqlen_q (aligned to the bottom right), 0 aligns to the top left.
        window: keys visible to the left and right of a query, inclusive; None is unlimited.
        softmax_scale: factor of the scores, above 0; None is head_dim ** -0.5.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: fp32 (nheads,) or (batch, nheads).
        sinks: (nheads,), a score that every row sees and that has no value.
        bias: added to the scores, broadcast over (batch, nheads, seqlen_q, seqlen_k).
        mask: True where attended, broadcast likewise; mask, causal and window all apply together.
        deterministic: restricts a later backward pass to deterministic kernels.
        return_lse: also return the natural logarithm of the row sums, fp32 (batch, nheads, seqlen_q).

    Returns:
        The output, in q's layout with v's head_dim; with `return_lse`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel family does this here; the message lists each family's reason.
        LaunchError: the first call for these shapes happens while a CUDA graph is captured.
    """
    if layout not in LAYOUTS:
        raise WorkloadError(f'layout is "bhsd" or "bshd", got {layout!r}')
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise WorkloadError(f"softmax_scale is finite and above 0, got {softmax_scale}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedError(
            "flashgen.attention has no backward pass yet, and an input requires a gradient; "
            "call it under torch.no_grad() or detach the inputs"
        )
    if (
        softcap
        or window != (None, None)
        or alibi_slopes is not None
        or sinks is not None
        or bias is not None
        or mask is not None
    ):
        asked = {
            "window": window != (None, None),
            "softcap": bool(softcap),
            "alibi": alibi_slopes is not None,
            "sink": sinks is not None,
            "bias": bias is not None,
            "mask": mask is not None,
        }
        _refuse(serve.Call(q=q, k=k, v=v, causal=causal, bshd=layout == "bshd"), asked)
    op = ops.attention_lse_op if return_lse else ops.attention_op
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    if layout == "bhsd" and q_offset is None and softmax_scale is None:
        result = op(q, k, v, causal)
    else:
        offset, offset_tensor = _split_offset(q, q_offset, causal)
        result = op(q, k, v, causal, softmax_scale, layout == "bshd", offset, offset_tensor)
    return result


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    config: Config | None = None,
) -> Explanation:
    """Why `attention` with these arguments is served the way it is: the rung, the record, every family's reason.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: the tensors are not on a GPU, or no kernel family does this here.
    """
    from flashgen.runtime import dispatch

    if layout not in LAYOUTS:
        raise WorkloadError(f'layout is "bhsd" or "bshd", got {layout!r}')
    offset, offset_tensor = _split_offset(q, q_offset, causal)
    call = serve.Call(
        q=q,
        k=k,
        v=v,
        causal=causal,
        bshd=layout == "bshd",
        explicit_offset=offset is not None,
        offset_tensor=offset_tensor is not None,
        config=config,
    )
    workload = serve.workload_of(call)
    if not q.is_cuda:
        raise UnsupportedError(serve.not_on_gpu(workload, call))
    device = serve.device_at(q.get_device())
    spec = serve.specialization_of(call, workload)
    records = serve.records()
    return dispatch.explain(workload, spec, device, records, config=config, generated_only=call.generated_only)


def warmup(
    workloads: Iterable[Workload | str],
    *,
    seqlens: Iterable[int] | None = None,
    device: int | None = None,
    offset_tensor: bool = False,
) -> int:
    """Compile and load every kernel that the ladder can return for these workloads, so that serving never compiles.

    Args:
        workloads: workloads or their keys (`b1-h32-hk8-s4096-d128-causal`).
        seqlens: also these key lengths of each workload; None takes every config recorded for its specialization class
            and the default one, which covers any length.
        device: GPU index, None the current one. Tensors are taken to be aligned to 16 bytes, as torch's allocator
            gives them; others have kernels of their own, which their first call compiles.
        offset_tensor: also the kernels that read the query offset from a tensor.

    Returns:
        The number of kernels that are ready.

    Raises:
        WorkloadError: a key cannot be read.
        UnsupportedError: no family supports a workload.
        DeviceError: torch sees no such GPU.
        BuildError: a kernel does not compile.
    """
    index = device if device is not None else torch.cuda.current_device() if torch.cuda.is_available() else 0
    where = serve.device_at(index)
    lengths = None if seqlens is None else tuple(seqlens)
    pairs = set()
    for item in workloads:
        workload = Workload.parse(item) if isinstance(item, str) else item
        for variant in (False, True) if offset_tensor and workload.causal else (False,):
            spec = Specialization.of(workload, offset_tensor=variant)
            pairs |= {(spec, config) for config in _reachable(workload, spec, where, lengths)}
    return serve.warm(pairs, where, index)


def _reachable(
    workload: Workload, spec: Specialization, device: Device, lengths: tuple[int, ...] | None
) -> set[Config]:
    from flashgen.codegen.families import default_config, why_invalid
    from flashgen.runtime.dispatch import resolve

    records = serve.records()
    if lengths is not None:
        shapes = [workload, *(workload.with_shape(seqlen_k=n, seqlen_q=min(workload.seqlen_q, n)) for n in lengths)]
        return {resolve(shape, spec, device, records).config for shape in shapes}
    known = {record.config for record, _ in records.of(spec, device)}
    return {default_config(spec, device)} | {config for config in known if why_invalid(config, spec, device) is None}


def reload() -> None:
    """Read settings and databases again at the next call, e.g. after tuning beside a running process."""
    serve.reload()


def _split_offset(
    q: torch.Tensor, q_offset: int | torch.Tensor | None, causal: bool
) -> tuple[int | None, torch.Tensor | None]:
    if q_offset is None:
        return None, None
    if not causal:
        raise WorkloadError(f"q_offset shifts a causal mask and needs causal=True, got {q_offset!r} without")
    if not isinstance(q_offset, torch.Tensor):
        return int(q_offset), None
    if q_offset.dtype != torch.int32 or q_offset.shape != q.shape[:1] or q_offset.device != q.device:
        raise WorkloadError(
            f"a q_offset tensor is int32 (batch,) on the device of q, got {q_offset.dtype} {tuple(q_offset.shape)} "
            f"on {q_offset.device} for batch {q.shape[0]} on {q.device}"
        )
    return None, q_offset.contiguous()


def _refuse(call: serve.Call, asked: dict[str, bool]) -> None:
    """Raise the error that lists why no family does what was asked."""
    from dataclasses import replace

    from flashgen.codegen.families import reasons
    from flashgen.core.device import CATALOGUE

    spec = replace(Specialization.of(serve.workload_of(call)), **asked)  # type: ignore[arg-type]
    device = serve.device_at(call.q.get_device()) if call.q.is_cuda else CATALOGUE[0]
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons(spec, device).items())
    raise UnsupportedError(f"no kernel family serves {spec.key}: {listed}")
