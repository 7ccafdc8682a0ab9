"""The public call `merge_states`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.checks import is_name_in
from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.runtime.argument_types import UNEXPECTED, explain_failure
from flashgen.runtime.autograd.merging import merge_with_gradient
from flashgen.runtime.ops.keys import (
    are_plain,
    can_bypass_dispatcher,
    is_tracked,
    refuse_hidden_derivatives,
)
from flashgen.runtime.ops.merging import LAYOUTS, each_of, merge, merge_list_op, merge_op, tensors_of

Tensor = torch.Tensor


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    layout: str = "bhsd",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over disjoint sets of keys into the result over all of them.

    Each state is what `flashgen.attention(..., return_lse=True)` returns for the same queries and some of the keys: of
    a shared prefix and of suffixes, of chunks, of the ranks of a context-parallel group. With w = exp(lse - max lse) of
    each state, the output is the sum of w * out over the sum of w, in fp32 and in the order of the states.

    A state that saw no key, with an LSE of -inf (or FlashAttention-2's +inf), weighs nothing whatever its output
    holds; where none saw any, the output is 0 and the LSE -inf. It has a gradient: where one is asked for, states are
    stacked, and the backward pass is plain torch.

    Args:
        outs: outputs of the states in bfloat16, float16 or float32: one tensor with the states in front, (states,
            batch, nheads, seqlen_q, head_dim), of any strides with a contiguous last dimension, or a sequence of
            tensors, which need not have the same strides. Up to four of them are read where they are; more are stacked
            first.
        lses: their natural log-sum-exps, float32 (states, batch, nheads, seqlen_q), of any strides, or a sequence.
        layout: "bhsd"; "bshd" with outputs (batch, seqlen_q, nheads, head_dim); or "thd" for packed queries, with
            outputs (tokens, nheads, head_dim) and LSEs (nheads, tokens).
        dtype: of the merged output; None is that of the states.

    Returns:
        The output, in the layout of one state, and the LSE, float32 (batch, nheads, seqlen_q) or (nheads, tokens).

    Raises:
        WorkloadError: shapes, dtypes or strides break a rule.
        UnsupportedError: the tensors are not on a GPU.
        BuildError: the kernel does not compile, or FLASHGEN_NO_COMPILE forbids it.
        LaunchError: the first call of its kind happens while a CUDA graph is captured.
    """
    try:
        if not is_name_in(layout, LAYOUTS):
            raise WorkloadError(f'layout is "bhsd", "bshd" or "thd", got {shown(layout)}')
        tensors = (*tensors_of(outs), *tensors_of(lses))
        is_traced = is_dynamo_compiling()
        bypasses_dispatcher = not is_traced and (
            not tensors or (can_bypass_dispatcher(tensors[0], tensors[0], tensors[-1]) and are_plain(tensors))
        )
        if not bypasses_dispatcher:
            refuse_hidden_derivatives("merge_states", tensors, is_traced=is_traced)
        if torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in tensors)
            or (not (bypasses_dispatcher or is_traced) and is_tracked(tensors))
        ):
            return merge_with_gradient(outs, lses, layout, dtype)
        if bypasses_dispatcher:
            return merge(outs, lses, layout, dtype)
        if isinstance(outs, Tensor) and isinstance(lses, Tensor):
            return merge_op(outs, lses, layout, dtype)  # type: ignore[no-any-return]
        return merge_list_op(list(each_of(outs)), list(each_of(lses)), layout, dtype)  # type: ignore[no-any-return]
    except UNEXPECTED as error:
        explain_failure(error, locals())
        raise
