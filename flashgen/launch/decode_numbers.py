"""The numbers that the kernels of a decode config are launched with: they follow from shapes, never from lengths."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from flashgen.codegen.decode_splits import split_counts
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.launch.feature_arguments import LOG2E

MANY_ROWS = 64
"""As many as a tile of queries has at most."""

LEFT_OUT = 1 / 32
"""Part of the programs that a device has room for which a launch may leave out: 4 of 132."""

Strides = tuple[int, int, int]
"""In elements: of a sequence or a page, of a query or a slot, of a head."""

Grid = tuple[int, int, int]
"""Programs along the three axes of a launch."""


def strides_of(tensor: torch.Tensor) -> Strides:
    """All of a tensor's strides but the last."""
    first, second, third, _ = tensor.stride()
    return first, second, third


class DecodeShape(NamedTuple):
    """Shapes, strides and options of a decode call.

    A tuple, because each batch of new sizes makes one.

    Attributes:
        batch: sequences.
        nheads: query heads.
        nheads_k: heads of the caches, which divide them.
        seqlen_q: queries of each sequence.
        seqlen_k: keys that a sequence has at most: rows of a contiguous cache, or those of all pages of a table's row.
        head_dim_v: columns of the output.
        q_strides: of the queries.
        k_strides: of the keys' cache.
        v_strides: of the values' cache.
        o_strides: of the output.
        num_pages: pages of the caches.
        table_stride: elements from one sequence's page ids to the next one's.
        window_left: keys that a query sees before its own place.
        window_right: keys that it sees behind it; 0 is causal.
        split_size: keys of a partial result where the bits of a sequence depend on nothing else; 0 for equal shares.
        softmax_scale: factor of the scores.
        softcap: 0 is off.
        alibi_batch_stride: stride of the slopes along the batch, 0 where they are shared.
        has_leftpad: whether keys begin behind the first slot.
        has_batch_idx: whether sequences name their rows of the caches.
        has_lse: whether the LSE is written.
        members: sequences of a group that shares keys, where `batch` are such groups; 0 is none.
        own_seqlen_k: keys that each of them has at most behind the shared ones.
    """

    batch: int
    nheads: int
    nheads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim_v: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    o_strides: Strides
    window_left: int
    window_right: int
    softmax_scale: float
    table_stride: int = 0
    num_pages: int = 0
    split_size: int = 0
    softcap: float = 0.0
    alibi_batch_stride: int = 0
    has_leftpad: bool = False
    has_batch_idx: bool = False
    has_lse: bool = False
    members: int = 0
    own_seqlen_k: int = 0

    @property
    def rows(self) -> int:
        """Query rows of a key head."""
        return max(self.members, 1) * self.seqlen_q * (self.nheads // self.nheads_k)

    @property
    def sizes(self) -> Sizes:
        """What configs are chosen by, with the keys that queries see at most.

        Where bits may not depend on the batch, lengths are unknown (0), and groups that share keys are large.
        """
        queries = max(self.members, 1) * self.seqlen_q
        if self.members and self.split_size:
            queries = max(queries, MANY_ROWS)
        return Sizes(batch=self.batch, nheads=self.nheads, nheads_k=self.nheads_k, seqlen_q=queries, seqlen_k=self.keys)

    @property
    def keys(self) -> int:
        """Those that queries see at most; 0 where bits may not depend on the batch."""
        return 0 if self.split_size else min(self.seqlen_k, self.window_left + self.seqlen_q)


class DecodeNumbers(NamedTuple):
    """What a launch has beside pointers.

    Attributes:
        fixed: the numbers of both kernels that sizes leave as they are, by the names of their parameters.
        sized: the others, in the order of `SIZED` and then of the names that the schedule has.
        grids: programs of the first kernel and of the merge; the second is None where nothing can be split.
        part_rows: rows of partial results.
    """

    fixed: dict[str, int | float]
    sized: tuple[int, ...]
    grids: tuple[Grid, Grid | None]
    part_rows: int

    @classmethod
    def of(
        cls, shape: DecodeShape, config: Config, device: Device, fixed: dict[str, int | float] | None = None
    ) -> DecodeNumbers:
        """The numbers of a config for a shape on a device; `fixed` are those of an equal call of other sizes."""
        fixed = _fixed(shape, config) if fixed is None else fixed
        m_blocks, tile_rows = fixed["m_blocks"], fixed["tile_rows"]
        assert isinstance(m_blocks, int)
        assert isinstance(tile_rows, int)
        schedule = _grid if config["schedule"] == "grid" else _shares
        work = schedule(shape, config, device, m_blocks)
        window = (shape.seqlen_k, shape.window_left, shape.window_right, shape.table_stride)
        strides = (*shape.q_strides, *shape.k_strides, *shape.v_strides, *shape.o_strides)
        merges = -(-tile_rows // config.integer("merge_rows"))
        grids = (work.grid, (merges, *work.merged) if work.merged else None)
        return cls(fixed, (*window, *strides, *work.own), grids, work.slots * tile_rows)

    @staticmethod
    def names(config: Config) -> tuple[str, ...]:
        """The names of the numbers in `sized`."""
        return (*SIZED, *(_GRID if config["schedule"] == "grid" else _SHARES))

    def values(self, config: Config) -> dict[str, int | float]:
        """All numbers by the names of their parameters."""
        return {**self.fixed, **dict(zip(self.names(config), self.sized, strict=True))}


SIZED = (
    *("seqlen_k", "window_left", "window_right", "stride_table"),
    *(
        f"stride_{tensor}{axis}"
        for tensor, axes in {"q": "bsh", "k": "psh", "v": "psh", "o": "bsh"}.items()
        for axis in axes
    ),
)
"""Numbers that follow from sizes and strides."""

_SHARES = ("batch", "groups", "beside", "most_pairs", "most_parts", "pair_units")
_GRID = ("slots", "least_splits", "most_splits")


class _Work(NamedTuple):
    """How a schedule divides the pairs of sequence, key head and block of query rows.

    `merged` are the axes of what the merge looks at, if anything, `slots` partial results, `own` numbers of the
    schedule.
    """

    grid: Grid
    slots: int
    merged: tuple[int, int] | None
    own: tuple[int, ...]


def _shares(shape: DecodeShape, config: Config, device: Device, m_blocks: int) -> _Work:
    heads = shape.nheads_k * m_blocks
    groups, beside = side_by_side(heads, device.num_sms * config.integer("per_sm"))
    blocks, programs = shape.batch * heads // beside, groups * beside
    slots, axes, most = 2 * programs, (beside, groups), config.integer("block_n")
    if shape.split_size:
        axes, most = (heads, shape.batch), shape.split_size
        slots = shape.batch * heads * -(-shape.seqlen_k // shape.split_size)
    # programs that have no more than one pair have no reason to weigh the beginning of another one
    weighs = blocks > groups and shape.seqlen_k > most and not shape.split_size
    most_pairs, most_parts = -(-blocks // groups), max(groups // blocks, 1)
    own = (shape.batch, groups, beside, most_pairs, most_parts, config.integer("overhead") if weighs else 0)
    merged = axes if shape.seqlen_k > most else None
    return _Work(grid=(beside, groups, 1), slots=slots, merged=merged, own=own)


@functools.lru_cache(maxsize=256)
def side_by_side(heads: int, programs: int) -> tuple[int, int]:
    """Groups of programs, and the programs of each, which have heads of one sequence and read the same keys in step.

    Heads of a key are neighbours in most caches, and DRAM gives what lies side by side faster. As many of the heads
    share a group as divide them and leave no more than a part of the programs out (`LEFT_OUT`).
    """
    whole = [each for each in range(1, heads + 1) if heads % each == 0]
    beside = max(each for each in whole if programs % each <= LEFT_OUT * programs or each == 1)
    return max(programs // beside, 1), beside


def _grid(shape: DecodeShape, config: Config, device: Device, m_blocks: int) -> _Work:
    heads = shape.nheads_k * m_blocks
    pairs = shape.batch * heads
    keys = shape.seqlen_k
    if not shape.members:
        # those of a window begin anywhere in a tile
        keys = min(keys, shape.window_left + shape.seqlen_q + config.integer("block_n") - 1)
    counts = split_counts(
        config, device, pairs=pairs, seqlen_k=keys, split_size=shape.split_size, is_batch=shape.batch > 1
    )
    own = (counts.slots, counts.least, counts.most)
    is_merged = counts.slots > 1
    return _Work(
        grid=(heads, shape.batch, counts.most),
        slots=pairs * counts.slots if is_merged else 0,
        merged=(heads, shape.batch) if is_merged else None,
        own=own,
    )


def _fixed(shape: DecodeShape, config: Config) -> dict[str, int | float]:
    block_m = config.integer("block_m")
    return {
        **_scales(shape),
        "nheads_k": shape.nheads_k,
        "seqlen_q": shape.seqlen_q,
        "num_pages": shape.num_pages,
        "members": shape.members,
        "own_seqlen_k": shape.own_seqlen_k,
        "group_size": shape.nheads // shape.nheads_k,
        "m_blocks": -(-shape.rows // block_m),
        "tile_rows": min(shape.rows, block_m),
        "split_tiles": shape.split_size // config.integer("block_n"),
        "has_leftpad": int(shape.has_leftpad),
        "has_batch_idx": int(shape.has_batch_idx),
        "lse_rows": shape.seqlen_q if shape.has_lse else 0,
        "stride_alibi_b": shape.alibi_batch_stride,
    }


def _scales(shape: DecodeShape) -> dict[str, float]:
    if not shape.softcap:
        return {"softmax_scale_log2": shape.softmax_scale * LOG2E}
    rate = 2 * LOG2E * shape.softmax_scale / shape.softcap
    return {"softcap_rate": rate, "softcap_scale_log2": 2 * LOG2E * shape.softcap}
