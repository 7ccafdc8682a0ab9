"""`flash_attn.bert_padding`: from padded batches to packed sequences and back, in torch's operations."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor: `input[indices]`, with a gradient."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows at their places among `first_axis_dim` rows, 0 elsewhere, with a gradient."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a tensor, and the tensor, whose gradients add up."""
    return input.index_select(0, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask selects, one behind the other. It waits for the device.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers: 1 where a token is.
        unused_mask: likewise, 1 where there is room for a token that is not used; None is nowhere.

    Returns:
        The rows (total, ...); their places in the flat batch; where sequences begin, int32 (batch + 1,); the longest
        one; how many tokens of each are used, int32 (batch,). All but the last count room as tokens.
    """
    room = attention_mask if unused_mask is None else attention_mask + unused_mask
    ends, longest = _ends(room.sum(dim=-1, dtype=torch.int32))
    indices = room.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, ends, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same of a batch whose rows hold several sequences each, as lists of their lengths. It waits for the device.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen): each row begins with the lengths of its sequences, and 0 follow.

    Returns:
        The rows (total, ...); their places in the flat batch; where sequences begin, int32; the longest one.
    """
    lengths = attention_mask_in_length.flatten()
    ends, longest = _ends(lengths[lengths.nonzero().flatten()])
    place = torch.arange(attention_mask_in_length.shape[-1], device=lengths.device)
    indices = (place < attention_mask_in_length.sum(dim=-1, keepdim=True)).flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed rows (total, ...) at their places in a batch (batch, seqlen, ...), 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))  # type: ignore[no-untyped-call, no-any-return]


def _ends(lengths: Tensor) -> tuple[Tensor, int]:
    """Where sequences of these lengths begin, and where the last one ends, and the longest one."""
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return ends, int(lengths.max()) if lengths.numel() else 0
