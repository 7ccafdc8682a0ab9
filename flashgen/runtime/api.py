"""The public calls: `attention`, `explain`, `warmup`, `reload`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.extras import BlockMask
from flashgen.runtime import ops, serve
from flashgen.runtime.calls import Problem
from flashgen.runtime.feature_rules import check_window
from flashgen.runtime.mods import UserCallable, handle_for

if TYPE_CHECKING:
    from flashgen.runtime.dispatch import Explanation

LAYOUTS = ("bhsd", "bshd")
NO_BACKWARD = (
    "flashgen.attention has no backward pass yet, and an input requires a gradient; "
    "call it under torch.no_grad() or detach the inputs"
)

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
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    block_mask: BlockMask | None = ...,
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
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    block_mask: BlockMask | None = ...,
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
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    block_mask: BlockMask | None = ...,
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
    score_mod: UserCallable | None = None,
    mask_mod: UserCallable | None = None,
    aux: tuple[torch.Tensor, ...] = (),
    block_mask: BlockMask | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, `softmax(scale * q k^T) v` and what models add to it, by the best kernel known for the call.

    A score of query i and key j is computed in this order, in fp32 and without a matrix of seqlen_q x seqlen_k:
    `softmax_scale * q_i . k_j`, then `softcap`, ALiBi, `bias`, `score_mod`. It counts where `causal`, `window`, `mask`
    and `mask_mod` all leave it visible. A row that sees no key has output 0 and LSE -inf.

    Any strides are taken without a copy, as long as the last dimension of q, k and v is contiguous. The forward kernels
    are deterministic. Products of float32 are exact (IEEE) unless torch's own switch allows TF32 and the GPU has it:
    `torch.backends.cuda.matmul.fp32_precision = "tf32"` or `torch.set_float32_matmul_precision("high")`.

    Args:
        q: queries, (batch, nheads, seqlen_q, head_dim), or (batch, seqlen_q, nheads, head_dim) with layout "bshd";
            bfloat16, float16 or float32 on a GPU.
        k: keys, like q with nheads_k heads and seqlen_k; nheads must be a multiple of nheads_k (GQA, MQA).
        v: values, like k with head_dim_v.
        layout: "bhsd" (torch) or "bshd" (flash-attn), of q, k, v and the output.
        causal: key j is visible to query i iff `j <= i + q_offset`.
        q_offset: position of the first query among the keys, for causal, window and ALiBi: an int, or an int32 tensor
            (batch,) on the GPU; None is seqlen_k - seqlen_q (aligned to the bottom right), 0 aligns to the top left.
        window: (left, right), inclusive: key j is visible to query i iff
            `i + q_offset - left <= j <= i + q_offset + right`; None is unlimited, and causal makes right 0. The time of
            a call follows the visible keys.
        softmax_scale: factor of the scores, above 0; None is head_dim ** -0.5.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: `-slope * |i + q_offset - j|` is added; float32 (nheads,) or (batch, nheads).
        sinks: one more score for each head, (nheads,) in float32 or the dtype of q, that every row sees and that has no
            value; neither scaled nor capped. The LSE includes it: with a sink, a row that sees no key has it as LSE.
        bias: added to the scores; float32, float16 or bfloat16, broadcast over (batch, nheads, seqlen_q, seqlen_k) in
            either layout, any strides. A row of -inf sees no key.
        mask: True where attended, a bool tensor broadcast likewise.
        score_mod: a function `score_mod(score, b, h, q_idx, k_idx, *aux)` in Triton's language that gives the score.
        mask_mod: a function `mask_mod(b, h, q_idx, k_idx, *aux)` in Triton's language, true where a key is visible.
        aux: contiguous tensors that both functions get as pointers.
        block_mask: the blocks that mask_mod leaves, from `flashgen.block_mask`; the others are never loaded.
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
        raise UnsupportedError(NO_BACKWARD)
    op: Any
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    if (
        softcap
        or window != (None, None)
        or alibi_slopes is not None
        or sinks is not None
        or bias is not None
        or mask is not None
        or score_mod is not None
        or mask_mod is not None
        or aux
        or block_mask is not None
    ):
        features = _features(
            window, softcap, alibi_slopes, sinks, bias, mask, score_mod, mask_mod, tuple(aux), block_mask
        )
        is_shifted = causal or window != (None, None) or alibi_slopes is not None
        offset, offset_tensor = _split_offset(q, q_offset, is_shifted)
        if (
            not is_dynamo_compiling()
            and ops.is_direct(q, k, v)
            and ops.are_plain((alibi_slopes, sinks, bias, mask))
            and len(features) == ops.FEATURES_WITHOUT_MODS
        ):
            op = ops.attention_features_lse_kernel if return_lse else ops.attention_features_kernel
        else:
            op = ops.attention_features_lse_op if return_lse else ops.attention_features_op
        result = op(q, k, v, causal, softmax_scale, layout == "bshd", offset, offset_tensor, *features)
        return result
    if not is_dynamo_compiling() and ops.is_direct(q, k, v):
        op = ops.attention_lse_kernel if return_lse else ops.attention_kernel
    else:
        op = ops.attention_lse_op if return_lse else ops.attention_op
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
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    score_mod: UserCallable | None = None,
    mask_mod: UserCallable | None = None,
    aux: tuple[torch.Tensor, ...] = (),
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
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
    features = _features(window, softcap, alibi_slopes, sinks, bias, mask, score_mod, mask_mod, tuple(aux), block_mask)
    is_shifted = causal or window != (None, None) or alibi_slopes is not None
    offset, offset_tensor = _split_offset(q, q_offset, is_shifted)
    call = ops.call_of(
        q,
        k,
        v,
        features[: ops.FEATURES_WITHOUT_MODS],
        *features[ops.FEATURES_WITHOUT_MODS :],
        causal=causal,
        bshd=layout == "bshd",
        explicit_offset=offset is not None,
        offset_tensor=offset_tensor is not None,
        with_lse=return_lse,
        config=config,
    )
    problem = Problem.of(call)
    if not q.is_cuda:
        raise UnsupportedError(serve.not_on_gpu(problem.workload, call))
    device = serve.device_at(q.get_device())
    problem = problem.on(device)
    return dispatch.explain(
        problem.workload,
        problem.spec,
        device,
        serve.records(),
        config=config,
        generated_only=call.generated_only,
    )


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
        for variant in (False, True) if offset_tensor and _has_positions(workload) else (False,):
            spec = Specialization.of(workload, offset_tensor=variant)
            pairs |= {(spec, config) for config in _reachable(workload, spec, where, lengths)}
    return serve.warm(pairs, where, index)


def _has_positions(workload: Workload) -> bool:
    """Whether a query offset changes anything."""
    has_window = workload.window_left is not None or workload.window_right is not None
    return workload.causal or workload.alibi or has_window


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


def _features(
    window: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    score_mod: UserCallable | None,
    mask_mod: UserCallable | None,
    aux: tuple[torch.Tensor, ...],
    block_mask: BlockMask | None,
) -> tuple[Any, ...]:
    """The feature arguments of an op, as far as they can be checked without the shapes of q and k."""
    check_window(window)
    if not 0 <= softcap < math.inf:
        raise WorkloadError(f"softcap is finite and at least 0 (off), got {softcap}")
    if torch.is_grad_enabled():
        for tensor in (alibi_slopes, sinks, bias, *aux):
            if tensor is not None and tensor.requires_grad:
                raise UnsupportedError(NO_BACKWARD)
    plain = (*window, softcap, alibi_slopes, sinks, bias, mask)
    if score_mod is None and mask_mod is None:
        if aux or block_mask is not None:
            raise WorkloadError("aux tensors and a block mask belong to a score_mod or a mask_mod, got neither")
        return plain
    handle = handle_for(score_mod, mask_mod, tuple(tensor.dtype for tensor in aux), block_mask is not None)
    if block_mask is None:
        return (*plain, handle, aux)
    return (*plain, handle, aux, *ops.split_block_mask(block_mask))


def _split_offset(
    q: torch.Tensor, q_offset: int | torch.Tensor | None, is_shifted: bool
) -> tuple[int | None, torch.Tensor | None]:
    if q_offset is None:
        return None, None
    if not is_shifted:
        given = "a tensor" if isinstance(q_offset, torch.Tensor) else repr(q_offset)
        raise WorkloadError(
            f"q_offset shifts a causal mask, a window or ALiBi and needs one of them, got {given} alone"
        )
    if not isinstance(q_offset, torch.Tensor):
        return int(q_offset), None
    if q_offset.dtype != torch.int32 or q_offset.shape != q.shape[:1] or q_offset.device != q.device:
        raise WorkloadError(
            f"a q_offset tensor is int32 (batch,) on the device of q, got {q_offset.dtype} {tuple(q_offset.shape)} "
            f"on {q_offset.device} for batch {q.shape[0]} on {q.device}"
        )
    return None, q_offset.contiguous()
