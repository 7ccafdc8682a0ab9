"""Shapes and strides of the tensors of one call, of either direction, and the arguments of kernels that follow."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flashgen.codegen.family import Sizes
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.errors import LaunchError
from flashgen.core.features.pages import keys_of_a_table
from flashgen.core.features.positions import MAX_OFFSET
from flashgen.core.features.score_tensors import Shape4, broadcast_strides
from flashgen.core.features.sequences import is_packed, sequences_of
from flashgen.core.features.values import BlockMask, Features
from flashgen.launch.vocabulary import STRIDED

View4 = tuple[Shape4, Shape4]
"""Shape and strides (in elements) of a tensor in (batch, head, sequence, head_dim) order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """Sizes of a block mask: its blocks, and how far apart the query blocks of batches and heads are (0: shared)."""

    query_blocks: int = 0
    key_blocks: int = 0
    stride_b: int = 0
    stride_h: int = 0

    @classmethod
    def of(cls, block_mask: BlockMask) -> BlockGrid:
        """The sizes of a block mask whose counts are contiguous."""
        batch, nheads, query_blocks = block_mask.partial_counts.shape
        return cls(
            query_blocks=query_blocks,
            key_blocks=block_mask.partial_indices.shape[-1],
            stride_b=nheads * query_blocks if batch > 1 else 0,
            stride_h=query_blocks if nheads > 1 else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGrid:
    """What the host knows of packed sequences: how many there are, and the most queries and keys of one.

    Of keys in pages also how many of a sequence a block table has room for, and how far apart its rows are.
    """

    sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    table_keys: int | None = None
    table_stride: int = 0

    @classmethod
    def of(cls, features: Features, page_size: int) -> PackedGrid:
        """That of a call's sequences; the size of pages counts where it has a block table."""
        (queries, keys), table = features.max_seqlens, features.block_table
        found = cls(sequences=sequences_of(features), max_seqlen_q=queries, max_seqlen_k=keys)
        if table is None:
            return found
        return replace(found, table_keys=keys_of_a_table(features, page_size), table_stride=table.stride(0))


class Geometry(NamedTuple):
    """Shapes and strides of a call's tensors: whatever else its calls bring, a plan for them can be launched.

    Attributes:
        tensors: by their ids in the launch vocabulary: q, k, v and o, the gradients do, dq, dk and dv of a backward
            pass, and the bias and the mask of the features. These two have size 1 and stride 0 where they broadcast.
        alibi_batch_stride: stride of the slopes along the batch, 0 where they are shared.
        blocks: the sizes of a block mask.
        dbias_shape: of the gradient of a bias of kind "full".
        packed: of packed sequences, all of which are one batch element.
    """

    tensors: dict[str, View4]
    alibi_batch_stride: int = 0
    blocks: BlockGrid | None = None
    dbias_shape: Shape4 | None = None
    packed: PackedGrid | None = None

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, features: Features | None = None
    ) -> Geometry:
        """The geometry of four tensors in bhsd order, and of what comes beside them."""
        tensors = {name: _view(tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out))}
        if features is None:
            return cls(tensors=tensors)
        scores = (*q.shape[:3], k.shape[2])
        for name, tensor in (("bias", features.bias), ("mask", features.mask)):
            if tensor is not None:
                tensors[name] = _broadcast_view(tensor, scores)
        slopes, block_mask = features.alibi_slopes, features.block_mask
        return cls(
            tensors=tensors,
            alibi_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            blocks=None if block_mask is None else BlockGrid.of(block_mask),
            packed=PackedGrid.of(features, k.shape[2]) if is_packed(features) else None,
        )

    @property
    def q_shape(self) -> Shape4:
        """(batch, nheads, seqlen_q, head_dim)."""
        return self.tensors["q"][0]

    @property
    def k_shape(self) -> Shape4:
        """(batch, nheads_k, seqlen_k, head_dim)."""
        return self.tensors["k"][0]

    @property
    def sizes(self) -> Sizes:
        """What grids and scratch memory depend on."""
        tensors, packed = self.tensors, self.packed
        (batch, nheads, seqlen_q, _), (_, nheads_k, seqlen_k, _) = tensors["q"][0], tensors["k"][0]
        if packed is None:
            return Sizes(batch, nheads, nheads_k, seqlen_q, seqlen_k)
        return Sizes(
            batch=batch,
            nheads=nheads,
            nheads_k=nheads_k,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            sequences=packed.sequences,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_k=packed.max_seqlen_k,
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query row, or no key at all."""
        tensors, packed = self.tensors, self.packed
        is_without_pages = packed is not None and packed.table_keys == 0
        return 0 in tensors["q"][0] or 0 in tensors["k"][0] or is_without_pages

    def tensor(self, name: str) -> View4:
        """Shape and strides of a tensor by its id.

        Raises:
            LaunchError: the call has none, which a kernel may ask of a bias or a mask.
        """
        found = self.tensors.get(name)
        if found is None:
            raise LaunchError(f"the kernel reads {name.capitalize()}, and the features of the call have none")
        return found

    def described(self, name: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a tensor as a descriptor of some rank describes it.

        Of rank 5 it has the heads that share keys in an axis of their own: (batch, nheads_k, group, seqlen, head_dim).
        Packed sequences have instead what clips at the end of a sequence (`clipped`).
        """
        shape, strides = self.tensors.get(name) or self.tensor(name)
        if rank == len(shape):
            return shape, legal_strides(shape, strides)
        if self.packed is not None:
            return clipped(shape, legal_strides(shape, strides))
        (batch, nheads, *rest), (stride_b, *inner) = shape, strides
        nheads_k = self.k_shape[1]
        group = nheads // nheads_k
        grouped = (batch, nheads_k, group, *rest)
        return grouped, legal_strides(grouped, (stride_b, group * inner[0], *inner))


def _view(tensor: torch.Tensor) -> View4:
    return tuple(tensor.shape), tensor.stride()  # type: ignore[return-value]


def _broadcast_view(tensor: torch.Tensor, scores: Shape4) -> View4:
    """That of a bias or a mask, in which every axis but the keys has size 1 where it is broadcast."""
    strides = broadcast_strides(tensor)
    batch, nheads, rows = (size if stride else 1 for size, stride in zip(scores[:3], strides, strict=False))
    return (batch, nheads, rows, scores[3]), strides


def aligned16(geometry: Geometry, pointers: int, element_bytes: int) -> bool:
    """Whether every pointer (or-ed together in `pointers`) and every stride in use is a multiple of 16 bytes.

    That is of all tensors but bias and mask; elements have `element_bytes` bytes.
    """
    if pointers % ALIGNMENT_BYTES:
        return False
    for name, view in geometry.tensors.items():
        if name in _STRIDES and not has_aligned_strides(*view, element_bytes):
            return False
    return True


def has_aligned_strides(shape: Shape4, strides: Shape4, element_bytes: int) -> bool:
    """Whether every stride in use of a tensor is a multiple of 16 bytes."""
    step = ALIGNMENT_BYTES // element_bytes
    (batch, heads, rows, _), (stride_b, stride_h, stride_s, _) = shape, strides
    return not ((batch > 1 and stride_b % step) or (heads > 1 and stride_h % step) or (rows > 1 and stride_s % step))


def scalars(geometry: Geometry) -> dict[str, int]:
    """The integer arguments of the launch vocabulary that a geometry fixes, and `q_offset` by default."""
    return dict(zip(scalar_names(geometry), scalar_values(geometry), strict=True))


def scalar_names(geometry: Geometry) -> tuple[str, ...]:
    """The names of these, the same of all geometries that have the same tensors."""
    return _scalar_names(tuple(geometry.tensors))


def scalar_values(geometry: Geometry) -> list[int]:
    """The numbers themselves, in that order."""
    tensors, blocks, packed = geometry.tensors, geometry.blocks, geometry.packed
    (batch, nheads, seqlen_q, _), (pages, nheads_k, seqlen_k, _) = tensors["q"][0], tensors["k"][0]
    group = nheads // nheads_k
    if len(tensors) == len(_PLAIN) and blocks is None and packed is None:  # as most new lengths are
        (_, (a, b, c, _)), (_, (d, e, f, _)), (_, (g, h, i, _)), (_, (s, t, u, _)) = tensors.values()
        values = [batch, nheads, group, seqlen_q, seqlen_k, seqlen_k - seqlen_q, geometry.alibi_batch_stride]
        values += (*_ABSENT, 0, seqlen_q, seqlen_k, 0, 0, 0, a, b, c, d, e, f, g, h, i, s, t, u, *_ABSENT, *_ABSENT)
        return values
    table = (0, 0, 0)
    if packed is not None and packed.table_keys is not None:
        seqlen_k = packed.table_keys
        table = (pages, seqlen_k, packed.table_stride)
    values = [batch, nheads, group, seqlen_q, seqlen_k, seqlen_k - seqlen_q, geometry.alibi_batch_stride]
    if blocks is None:
        values += _ABSENT
    else:
        values += (blocks.query_blocks, blocks.key_blocks, blocks.stride_b, blocks.stride_h)
    values += (0 if packed is None else packed.sequences, seqlen_q, seqlen_k, *table)
    for name, (_, strides) in tensors.items():
        values += strides[:3] if name in _STRIDES else strides
    for name in _SCORE_STRIDES:
        if name not in tensors:
            values += _ABSENT
    if "dq" in tensors:
        values += _dbias_scalars(geometry)
    return values


@functools.cache
def _scalar_names(tensors: tuple[str, ...]) -> tuple[str, ...]:
    given = (stride for name in tensors for stride in _STRIDES.get(name) or _SCORE_STRIDES[name])
    absent = (stride for name, strides in _SCORE_STRIDES.items() if name not in tensors for stride in strides)
    sizes = ("batch", "nheads", "group_size", "seqlen_q", "seqlen_k", "q_offset", "stride_alibi_b")
    blocks = ("num_q_blocks", "num_k_blocks", "stride_block_b", "stride_block_h")
    packed = ("sequences", "total_q", "total_k", "num_pages", "table_keys", "stride_table")
    return (*sizes, *blocks, *packed, *given, *absent, *(_DBIAS_SCALARS if "dq" in tensors else ()))


_STRIDES = {name: tuple(f"stride_{name}{axis}" for axis in "bhs") for name in STRIDED}
_SCORE_STRIDES = {name: tuple(f"stride_{name}_{axis}" for axis in "bhqk") for name in ("bias", "mask")}
_PLAIN, _ABSENT = ("q", "k", "v", "o"), (0, 0, 0, 0)
_DBIAS_SCALARS = ("stride_dbias_b", "stride_dbias_h", "stride_dbias_q", "bias_batch", "bias_heads")

Q_OFFSET_PLACE = _scalar_names(()).index("q_offset")
"""Where `q_offset` is among `scalar_values`, whatever tensors there are."""


def _dbias_scalars(geometry: Geometry) -> tuple[int, int, int, int, int]:
    """Of the gradient of a bias; of kind "keys" it has a row for every head, where there is a gradient at all."""
    if geometry.dbias_shape is None:
        (batch, heads, _, _), keys = geometry.q_shape, geometry.k_shape[2]
        return heads * keys, keys, 0, batch, heads
    batch, heads, rows, keys = geometry.dbias_shape
    steps = (heads * rows * keys if batch > 1 else 0, rows * keys if heads > 1 else 0, keys if rows > 1 else 0)
    return *steps, batch, heads


def clamp_offset(q_offset: int, geometry: Geometry, *, is_far: bool = False) -> int:
    """A query offset as 32 bits."""
    low, high = offset_range(geometry.q_shape[2], geometry.k_shape[2], is_far=is_far)
    return max(low, min(q_offset, high))


def offset_range(rows: int, keys: int, *, is_far: bool) -> tuple[int, int]:
    """The query offsets beyond which nothing changes for so many queries and keys: with a causal mask alone, these.

    `is_far` is for kernels with a window or ALiBi, whose scores go on changing.
    """
    return (-MAX_OFFSET, MAX_OFFSET) if is_far else (-rows, keys)


CLIPPED_ROWS = 1 << 30
"""Rows of a tensor of packed sequences as TMA counts them; the kernels have the same number."""

_ANY_END = 0x7FFF0000
_WRAP = (1 << 64) // CLIPPED_ROWS


def clipped(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tensor (1, heads, rows, head_dim) as TMA clips it behind any row: (wrap, end, heads, rows, head_dim).

    Row i of the n rows of a sequence that ends before row `end` is at (CLIPPED_ROWS, end, head, CLIPPED_ROWS - n + i):
    what lies behind the sequence is outside of the axis of rows, so loads give zeros there and stores leave it alone.
    Both axes of rows take a step of one row, together CLIPPED_ROWS rows too many, which the first axis takes back: its
    stride times its place and theirs are 2**64 elements, nothing in addresses of 64 bits.

    Source: `ragged_tma` of Triton's tools.
    """
    (_, heads, _, columns), (_, stride_h, stride_s, _) = shape, strides
    return (_ANY_END, _ANY_END, heads, CLIPPED_ROWS, columns), (_WRAP - stride_s, stride_s, stride_h, stride_s, 1)


def legal_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides that a tensor descriptor takes: a dimension of size 1 is never stepped over, so any stride will do."""
    if 1 not in shape and 0 not in shape:
        return (*strides[:-1], 1)
    return (*[s if n > 1 else ALIGNMENT_BYTES for n, s in zip(shape[:-1], strides, strict=False)], 1)
