"""The public call: `attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.features.values import BlockMask, Window
from flashgen.runtime.argument_types import UNEXPECTED, explain_failure, refuse_names
from flashgen.runtime.arguments import (
    LAYOUTS,
    CallArguments,
    check_layout,
    check_scale,
    drawn_state,
    features_of,
    in_autocast,
    requires_gradient,
    split_offset,
    with_bias_of_each_key,
)
from flashgen.runtime.autograd import training
from flashgen.runtime.ops import forward as ops
from flashgen.runtime.ops.keys import (
    WITH_LSE,
    are_plain,
    can_bypass_dispatcher,
    have_plain_functions,
    is_plain_offset,
    is_tracked,
    refuse_lists_mapped_alone,
    refuse_tangents,
    refuse_traced_transforms,
    tensors_of,
)
from flashgen.runtime.ops.mods import UserCallable
from flashgen.runtime.ops.schemas import SERVED

if TYPE_CHECKING:
    from typing_extensions import Unpack

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[CallArguments],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **arguments: Unpack[CallArguments]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **arguments: Unpack[CallArguments]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(  # noqa: C901, PLR0912, PLR0915 - in one piece, because every call of a function costs as much as five branches
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
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, `softmax(scale * q k^T) v` and what models add to it, by the best kernel known for the call.

    A score of query i and key j is computed in this order, in fp32 and without a matrix of seqlen_q x seqlen_k:
    `softmax_scale * q_i . k_j`, then `softcap`, ALiBi, `bias`, `score_mod`. It counts where `causal`, `window`, `mask`
    and `mask_mod` all leave it visible. A row that sees no key has output 0 and LSE -inf.

    It trains: where autograd is on and q, k, v, bias or sinks require a gradient, `loss.backward()` runs kernels that
    are looked up, tuned and compiled like those of forward passes. Between the passes only q, k, v, the output and the
    LSE are kept, so memory grows with the lengths and never with their product. The backward pass computes the scores
    again: 2.5 times the operations of a forward pass, for all of dq, dk and dv, whichever are asked for. A score_mod is
    differentiated from its source, by the score and by what it loads from aux tensors that require a gradient.
    Gradients of ALiBi slopes and of gradients are not computed.

    Any strides are taken, as long as the last dimension of q, k and v is contiguous; only where an address or a stride
    is no multiple of 16 bytes do calls with much to do copy them. Under `torch.autocast`, q, k and v are cast to its
    dtype, as torch does it for SDPA. The forward kernels are deterministic. Products of float32 are exact (IEEE)
    unless torch's own switch allows TF32 and the GPU has it: `torch.backends.cuda.matmul.fp32_precision = "tf32"` or
    `torch.set_float32_matmul_precision("high")`.

    With `dropout_p`, weights of the softmax are set to 0 and the others divided by what is left, as SDPA does it; the
    LSE is that of all. Which ones follows from `rng_state` and their places alone: no config, device or neighbour
    changes it, and the backward pass finds them again without a mask in memory.

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
        dropout_p: the probability with which a weight is dropped, at least 0 and below 1, to the nearest multiple of
            2 ** -16. As of SDPA it is the caller's to be 0 in evaluation.
        rng_state: the seed and the offset of the bits of dropout, int64 (2,) on the GPU; None draws them by torch's
            generator of the device, so that `torch.manual_seed`, checkpoints and captured CUDA graphs, whose replays
            draw others, do what they do for torch's own dropout. Without effect where dropout_p is 0.
        deterministic: the same bits of every gradient every time, by kernels whose sums have a fixed order: they take
            some 10 to 25 % longer at head dimensions of 64 and 128, and hardly longer at 256.
            `torch.use_deterministic_algorithms(True)` asks for the same.
        return_lse: also return the natural logarithm of the row sums, fp32 (batch, nheads, seqlen_q), which has a
            gradient like the output.
        others: none: a name of torch's SDPA or of FlashAttention is answered with the one that it has here.

    Returns:
        The output, in q's layout with v's head_dim; with `return_lse`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel family does this here, or none its backward pass; the message lists each family's
            reason. Or a gradient is asked for that is not computed.
        LaunchError: the first call for these shapes happens while a CUDA graph is captured.
        TypeError: there is no such argument.
    """
    if others:
        refuse_names("attention", others)
    try:
        if layout not in LAYOUTS:
            check_layout(layout)
        if softmax_scale is not None:
            check_scale(softmax_scale)
        is_traced = is_dynamo_compiling()
        if is_traced:
            refuse_traced_transforms("attention")
        if is_traced or _is_any_autocast_enabled():
            q, k, v, sinks = in_autocast(q, k, v, sinks)
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        op: Any
        if (
            softcap
            or dropout_p
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
            features = features_of(
                window=window,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                bias=bias,
                mask=mask,
                score_mod=score_mod,
                mask_mod=mask_mod,
                aux=aux,
                block_mask=block_mask,
                dropout_p=dropout_p,
                rng_state=drawn_state(dropout_p, rng_state, q),
                is_traced=is_traced,
            )
            is_shifted = causal or window != (None, None) or alibi_slopes is not None
            options = (causal, softmax_scale, layout == "bshd", *split_offset(q, q_offset, is_shifted=is_shifted))
            bypasses_dispatcher = (
                not is_traced
                and can_bypass_dispatcher(q, k, v)
                and (q_offset is None or is_plain_offset(q_offset))
                and are_plain(tensors_of(features))
                and (not features.mods or have_plain_functions(features))
            )
            if not (bypasses_dispatcher or is_traced):
                tensors = (q, k, v, *tensors_of(features))
                refuse_tangents("attention", (*tensors, *features.aux))
                refuse_lists_mapped_alone("attention", tensors, features)
            if torch.is_grad_enabled() and requires_gradient(
                q, k, v, features, is_hidden=not (bypasses_dispatcher or is_traced)
            ):
                if bias is not None and score_mod is not None and (bias.requires_grad or not bypasses_dispatcher):
                    features = with_bias_of_each_key(features, k, bshd=layout == "bshd")
                train_features = training.direct_features if bypasses_dispatcher else training.features_attention
                result = train_features(q, k, v, options, features, deterministic, return_lse)
            elif bypasses_dispatcher:
                result = ops.attention_features_kernel(q, k, v, *options, features, WITH_LSE if return_lse else 0)
            else:
                op = ops.attention_features_lse_op if return_lse else ops.attention_features_op
                result = op(q, k, v, *options, *SERVED.flat(features))
            return result
        bypasses_dispatcher = (
            not is_traced and can_bypass_dispatcher(q, k, v) and (q_offset is None or is_plain_offset(q_offset))
        )
        if not (bypasses_dispatcher or is_traced):
            refuse_tangents("attention", (q, k, v))
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (not (bypasses_dispatcher or is_traced) and is_tracked((q, k, v)))
        ):
            offsets = split_offset(q, q_offset, is_shifted=causal)
            asked = (causal, softmax_scale, layout == "bshd", *offsets, deterministic, return_lse)
            train = training.direct_attention if bypasses_dispatcher else training.plain_attention
            result = train(q, k, v, asked)
            return result
        if bypasses_dispatcher:
            op = ops.attention_lse_kernel if return_lse else ops.attention_kernel
        else:
            op = ops.attention_lse_op if return_lse else ops.attention_op
        if layout == "bhsd" and q_offset is None and softmax_scale is None:
            result = op(q, k, v, causal)
        else:
            result = op(q, k, v, causal, softmax_scale, layout == "bshd", *split_offset(q, q_offset, is_shifted=causal))
        return result
    except UNEXPECTED as error:
        explain_failure(error, locals())
        raise
