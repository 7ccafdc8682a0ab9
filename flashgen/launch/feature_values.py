"""`Features`: what a call may bring beside q, k, v, the scale and the query offset."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ALIGNMENT_BYTES = 16
"""What the copy engine demands of base addresses and strides, and the widest load of a thread."""

MAX_OFFSET = 1 << 28
"""Query offsets reach this far to both sides, so that sums with lengths and windows stay within 32 bits."""

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
"""Element types by the names of `core.workload.DTYPE_BYTES`."""

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMask:
    """Which blocks of `block_size` x `block_size` scores a mask_mod leaves, as lists of key blocks.

    Shapes are (batch or 1, nheads or 1, query blocks) for counts and the same with (key blocks) for indices, int32 on
    the device. `full_*` lists blocks in which every key is visible to every query, `partial_*` all other blocks with a
    visible key. `seqlen_q` and `seqlen_k` are the lengths it was built for, `mask_mod` is the digest of the function it
    was built from ("" where it was made by hand).
    """

    partial_counts: torch.Tensor
    partial_indices: torch.Tensor
    full_counts: torch.Tensor
    full_indices: torch.Tensor
    seqlen_q: int
    seqlen_k: int
    block_size: int = 128
    mask_mod: str = ""

    def sparsity(self) -> float:
        """Percent of the blocks that are hidden and never loaded (it waits for the device)."""
        blocks = self.partial_indices.numel()
        listed = int(self.partial_counts.sum()) + int(self.full_counts.sum())
        return 100.0 * (1.0 - listed / blocks) if blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Feature arguments of one call; what is absent is None, 0 or empty.

    Attributes:
        window: keys visible to the left and right of a query, inclusive; None is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: fp32 (nheads,) or (batch, nheads); `-slope * |i + q_offset - j|` is added.
        sinks: (nheads,), contiguous: a score that every row sees and that has no value.
        bias: four dimensions that broadcast to (batch, nheads, seqlen_q, seqlen_k), any strides; added to the scores.
        mask: bool, likewise; True where attended.
        aux: tensors for the user's score functions.
        block_mask: the blocks that a mask_mod leaves.
    """

    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    aux: tuple[torch.Tensor, ...] = field(default=())
    block_mask: BlockMask | None = None


def broadcast_strides(tensor: torch.Tensor) -> Shape4:
    """Strides in elements of a four-dimensional tensor as if it were expanded: 0 where its size is 1."""
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(strides)  # type: ignore[return-value]


def broadcast_kind(tensor: torch.Tensor | None) -> str:
    """The kind of a bias or a mask in a workload: "" for None, "keys" where all queries share a value, else "full"."""
    if tensor is None:
        return ""
    return "full" if broadcast_strides(tensor)[2] else "keys"


def aligned_scores(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether every bias or mask is contiguous along the keys, its pointer and other strides multiples of 16 bytes."""
    for tensor in tensors:
        if tensor is None:
            continue
        *outer, last = broadcast_strides(tensor)
        size = tensor.element_size()
        if last != 1 or tensor.data_ptr() % ALIGNMENT_BYTES or any(s * size % ALIGNMENT_BYTES for s in outer):
            return False
    return True


def clamp_window(window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The window as two 32-bit integers: an edge this far away hides nothing, whatever the query offset is."""
    reach = MAX_OFFSET + seqlen_q + seqlen_k
    left, right = (reach if edge is None else min(edge, reach) for edge in window)
    return left, right
