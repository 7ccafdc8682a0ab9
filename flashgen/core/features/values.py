"""`Features`: what a call brings beside q, k, v, the scale and the query offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.core.checks import check_fields, torch_tensor
from flashgen.core.errors import WorkloadError

if TYPE_CHECKING:
    import torch

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMask:
    """Which blocks of `block_size` x `block_size` scores a mask_mod leaves, as lists of key blocks.

    Shapes are (batch or 1, nheads or 1, query blocks) for counts and the same with (key blocks) for indices, int32 on
    the device. `full_*` lists blocks in which every key is visible to every query, `partial_*` all other blocks with a
    visible key. The `q_*` tensors are the same lists the other way, of the query blocks of each key block: (batch or 1,
    nheads or 1, key blocks) and the same with (query blocks). Backward passes read both, and a mask without them does
    not train. `seqlen_q` and `seqlen_k` are the lengths it was built for, `mask_mod` is the digest of the function it
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
    q_partial_counts: torch.Tensor | None = None
    q_partial_indices: torch.Tensor | None = None
    q_full_counts: torch.Tensor | None = None
    q_full_indices: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_fields(self, WorkloadError)
        names = ("partial_counts", "partial_indices", "full_counts", "full_indices")
        for_training = [f"q_{name}" for name in names if getattr(self, f"q_{name}") is not None]
        if len(for_training) not in (0, len(names)):
            raise WorkloadError(f"a block mask has all of its lists of query blocks or none, got {for_training}")
        for name in (*names, *for_training):
            torch_tensor(f"{name} of a block mask", getattr(self, name))

    @property
    def trains(self) -> bool:
        """Whether it has the lists that backward passes read."""
        return self.q_partial_counts is not None

    def sparsity(self) -> float:
        """Percent of the blocks that are hidden and never loaded (it waits for the device)."""
        blocks = self.partial_indices.numel()
        listed = int(self.partial_counts.sum()) + int(self.full_counts.sum())
        return 100.0 * (1.0 - listed / blocks) if blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Feature arguments of one call; what is absent is None, 0 or empty.

    A causal mask, the query offset and determinism are features of the table, too, but no fields: calls without any
    of these fields have them.

    Attributes:
        window: keys visible to the left and right of a query, inclusive; None is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: fp32 (nheads,) or (batch, nheads); `-slope * |i + q_offset - j|` is added.
        sinks: (nheads,), contiguous: a score that every row sees and that has no value.
        bias: four dimensions that broadcast to (batch, nheads, seqlen_q, seqlen_k), any strides; added to the scores.
        mask: bool, likewise; True where attended.
        mods: handle of the user's score functions; 0 is none.
        aux: tensors for the user's score functions.
        block_mask: the blocks that a mask_mod leaves.
        cu_seqlens_q: int32 (batch + 1,), the first query of each packed sequence, and the end of the last one.
        cu_seqlens_k: the same of the keys.
        seqused_q: int32 (batch,), how many queries of each sequence are used; all where it is absent.
        seqused_k: the same of the keys.
        max_seqlens: the most queries and keys that a packed sequence has.
        batch_invariant: whether the bits of a packed sequence must not depend on how many there are beside it.
        dropout_p: the probability with which a weight is dropped; 0 is off.
        rng_state: int64 (2,), the seed and the offset of the bits that say which.
        block_table: int32 (batch, pages), the pages of k and v in which the keys of each packed sequence lie.
    """

    window: Window = (None, None)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mods: int = 0
    aux: tuple[torch.Tensor, ...] = ()
    block_mask: BlockMask | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    max_seqlens: tuple[int, int] = (0, 0)
    batch_invariant: bool = False
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
