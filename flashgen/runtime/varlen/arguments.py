"""The arguments of `flashgen.attention_varlen` as features: to kernels a call is one batch element with all rows."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.checks import whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.ops.generated import with_sequences_function

_with_sequences, _traced_with_sequences = with_sequences_function(), with_sequences_function(is_traced=True)

MAX_ROWS = 2**30
"""Of all sequences together, exclusive: ends of blocks and widths of windows stay within 32 bits."""


def packed_features(
    scores: Features,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    batch_invariant: bool = False,
    block_table: torch.Tensor | None = None,
    page_size: int = 0,
) -> Features:
    """The features of scores with the sequences of a call; keys without ends of their own have those of queries.

    With a `block_table` they have as many keys as `seqused_k` says, or as lie between `cu_seqlens_k`.

    Raises:
        WorkloadError: ends of sequences are missing, or a bound of the lengths is, or is no length.
    """
    if cu_seqlens_q is None:
        check_tensor("cu_seqlens_q", cu_seqlens_q)  # without it this would be a call of one length
    if block_table is not None:
        if (cu_seqlens_k is None) == (seqused_k is None):
            raise WorkloadError(
                "keys in pages are as many as seqused_k says, or as lie between cu_seqlens_k, got "
                f"{'neither' if seqused_k is None else 'both'}"
            )
        if max_seqlen_k is None:
            check_tensor("block_table", block_table)
            max_seqlen_k = block_table.shape[-1] * page_size if block_table.dim() else 0
    if max_seqlen_k is None:
        if cu_seqlens_k is not None:
            raise WorkloadError("a call with cu_seqlens_k has max_seqlen_k, the most keys of a sequence, got None")
        max_seqlen_k = max_seqlen_q
    if type(max_seqlen_q) is not int or type(max_seqlen_k) is not int or max_seqlen_q < 0 or max_seqlen_k < 0:
        max_seqlen_q = whole_number("max_seqlen_q", max_seqlen_q, 0)
        max_seqlen_k = whole_number("max_seqlen_k", max_seqlen_k, 0)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    add = _traced_with_sequences if is_dynamo_compiling() else _with_sequences
    lengths = (max_seqlen_q, max_seqlen_k)
    return add(scores, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, lengths, batch_invariant, block_table)


def check_rows(*tensors: torch.Tensor, paged: bool = False) -> None:
    """Check that q, k and v are rows of heads, or that keys and values are pages of such.

    Raises:
        WorkloadError: one has not three dimensions, or of pages not four, or there are too many rows.
    """
    for name, tensor in zip("qkv", tensors, strict=True):
        if paged and name != "q":
            _check_pages(name, tensor)
        elif tensor.dim() != 3:
            raise WorkloadError(
                f"q, k and v of packed sequences are (rows, heads, head_dim), got {name} with shape "
                f"{tuple(tensor.shape)}"
            )
        if tensor.shape[0] >= MAX_ROWS:
            raise WorkloadError(f"packed sequences have less than {MAX_ROWS} rows, got {tensor.shape[0]} of {name}")


def one_batch_element(*tensors: torch.Tensor, paged: bool = False) -> list[torch.Tensor]:
    """q, k and v as the one batch element that they are, in (batch, sequence, head, head_dim) order.

    Keys and values in pages have such an order already: pages are their batch.

    Raises:
        WorkloadError: as `check_rows`.
    """
    check_rows(*tensors, paged=paged)
    return [tensor if paged and number else tensor.unsqueeze(0) for number, tensor in enumerate(tensors)]


def _check_pages(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 4:
        raise WorkloadError(
            f"with a block_table k and v are (pages, page_size, nheads_k, head_dim), got {name} with shape "
            f"{tuple(tensor.shape)}"
        )
