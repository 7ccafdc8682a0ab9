"""What the analytic model of `flashgen.tuning` is told of a family: plain values, which `cost_model.py` of each fills.

A config's kernels are loops over tiles of scores, and kernels beside them that do little else than move bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashgen.core.compiled import Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One program: its tile, its warps, and how its loads and steps overlap.

    Attributes:
        block_m: query rows of a tile, whichever side a program owns.
        block_n: keys of a tile.
        warps: warps that compute.
        stages: depth of the pipeline of loads.
        query_columns: columns of a tile of Q or K, padding included.
        value_columns: columns of a tile of V or O, padding included.
        pointer_loads: whether addresses are computed for every 16 bytes.
        heads_per_group: heads whose programs run side by side; 0 means all.
        heavy_first: whether the programs with the most work start first.
        steps_in_flight: steps that one warp works on at once: 2 where the next one's products hide a softmax.
        packed_heads: heads that share keys, whose rows the query rows are.
        walked_heads: query heads of a group that a program which owns keys walks over; 0 means all.
        query_shares: programs that share the queries of such keys.
        writes_dq: whether such a program has all keys, so that what it computes of dQ is all there is.
        precision: how fp32 tiles are multiplied, as Triton calls it; empty where elements have 16 bits.
        hardware_tanh: whether one special function computes the tanh of a softcap.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    query_columns: int
    value_columns: int
    pointer_loads: bool
    heads_per_group: int
    heavy_first: bool
    steps_in_flight: int = 1
    packed_heads: int = 1
    walked_heads: int = 0
    query_shares: int = 1
    writes_dq: bool = False
    precision: str = ""
    hardware_tanh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Unmasked and masked steps of every block of one head, in the order of its rows."""

    full: tuple[int, ...]
    masked: tuple[int, ...]

    @property
    def total(self) -> int:
        """Steps of all blocks together."""
        return sum(self.full) + sum(self.masked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One kernel of a workload.

    Attributes:
        rows: rows of the side that a program owns: queries of a forward pass, keys of the sums of dK and dV.
        columns: rows of the side that it walks, in one step.
        steps: the steps of each program of one head.
        heads: heads that have programs of their own.
        repeats: times that a program walks: the query heads that share a head of keys, one after the other.
        head_columns: columns of all products of a step together, padding included.
        walked_columns: columns of the tiles that a step loads, padding included.
        owned_columns: columns of the tiles of the program's own that a step reads again from shared memory.
        reads: how often the products of a step read what it loaded.
        score_operations: operations on each score beside the exponential.
        row_operations: operations of a step for each owned row.
        prologue: cycles of a program outside of its loop.
        tensor_bytes: bytes of all tensors once.
        walked_bytes: bytes of what is walked, once for all heads.
        added_bytes: bytes of a step that are added to memory shared with other programs, which is a read and a write.
        added_trips: how many times as long as one pass through shared memory they keep the warps busy.
        products_in_flight: whether the tensor cores read the operands of one product while they work on another.
        through_smem: whether every score goes through shared memory once more, for a product with the other side.
        warps, stages, pointer_loads, heads_per_group, heavy_first, steps_in_flight, precision, hardware_tanh: as in
            `Tiling`.
    """

    rows: int
    columns: int
    steps: Steps
    heads: int
    repeats: int
    head_columns: int
    walked_columns: int
    owned_columns: int
    reads: float
    score_operations: int
    row_operations: int
    prologue: int
    tensor_bytes: int
    walked_bytes: int
    added_bytes: int = 0
    added_trips: int = 0
    products_in_flight: bool = False
    through_smem: bool = False
    warps: int
    stages: int
    pointer_loads: bool
    heads_per_group: int
    heavy_first: bool
    steps_in_flight: int = 1
    precision: str = ""
    hardware_tanh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopKernel:
    """One looping kernel of a family.

    Attributes:
        name: what its entry has behind the family's id and an underscore; empty where the entry is the id.
        tile: its tile.
        loop: what it does for a workload.
        taken: about what it takes of an SM, before it is compiled.
        knobs: all that its time depends on, so that configs that agree in them share it; None means all.
    """

    tile: Callable[[Specialization, Config], Tiling]
    loop: Callable[[Workload, Tiling], Loop]
    taken: Callable[[Specialization, Config, Device], Taken]
    name: str = ""
    knobs: tuple[str, ...] | None = None

    def entry(self, config: Config) -> str:
        """The name of its function in the text of `config`."""
        return f"{config.family}_{self.name}" if self.name else config.family


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The knobs by which a model tells candidates apart.

    Attributes:
        tile_knobs: those that make a kernel another one; the best variant of each tile is tried before second ones.
        stage_knobs: those that a first look at different tiles varies as well.
    """

    tile_knobs: tuple[str, ...]
    stage_knobs: tuple[str, ...] = ()


def _nothing(workload: Workload, config: Config) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A family as the analytic model sees it.

    Attributes:
        kernels: the looping kernels, in the order of their launches.
        streamed_bytes: bytes that each of the other kernels of a config moves through device memory.
        ranking: None where the model knows the level of a default only, because the knobs change the order of
            instructions, which it does not see.
    """

    kernels: tuple[LoopKernel, ...]
    streamed_bytes: Callable[[Workload, Config], tuple[int, ...]] = _nothing
    ranking: Ranking | None = None


def blocks_side_by_side(registers: int, shared_bytes: int, threads: int, device: Device) -> int:
    """Programs of so many threads that an SM has room for, at least one."""
    fits = (
        device.regs_per_sm // (registers * threads),
        device.smem_per_sm // (shared_bytes + 1024),
        device.max_threads_per_sm // threads,
    )
    return max(min(fits), 1)
