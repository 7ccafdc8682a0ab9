"""`LoopModel`: the time that the analytic model gives a kernel that walks tiles of scores (`codegen.cost.Loop`).

For one program (`rows` of the side that it owns) and one step (`columns` of the side that it walks) the model counts
cycles of an SM:

| part | cycles | source |
|---|---|---|
| matrix products | 2 rows columns head_columns / rate | data sheets; padding to the height of wgmma counts |
| exponentials | rows columns / 16 | CUDA Programming Guide: 16 special functions a clock; a soft cap adds 2 |
| other arithmetic | operations of every score and row / fp32 lanes | what the kernel's loop does; masks add 3, |
| | | and the score's own features what FEATURE_OPERATIONS counts |
| shared memory | bytes / 128 | 128 bytes a clock; a walked tile is written once, read per warpgroup (wgmma) or warp; |
| | | with several products a step, warps share tiles in the grid that reads least |
| spills | 2 x spilled bytes x threads / 128 | every step stores and reloads them |
| sums in memory | trips x added bytes / 128 | through shared memory into a layout of whole rows, then out |
| parts of fp32 | 3 or 5 operations for each score and element of a walked tile | products of parts: TF32, bf16 |
| addresses | 8 operations for 16 bytes of a walked tile | counted; none with tensor descriptors |
| | 2 operations for each element of a bias or mask | loads of a tile in the layout of the scores are narrow |
| waiting | 300 | chain of products and barriers of one step: no resource, but time |
| | 600 | where warps share rows, so that sums go through shared memory |

With u groups of four warps that run independently (of all programs on an SM; twice as many where products
of the next step run during the softmax of this one) the parts overlap: `busiest + (sum - busiest) / u`. Where a step
has several products in flight, the larger one of products and shared memory counts alone. A pipeline of s stages hides
the latency of loads behind s - 1 steps of all programs. The number of steps of every block follows the causal mask and
the window (`codegen/common_steps.py`); programs fill `num_sms x occupancy` slots in waves: equal ones cost whole waves,
unequal ones the mean and a tail that is short when heavy ones start first. Padding of partial tiles counts as work. The
result is the larger of that and the time of the bytes that device memory and the L2 move; a bias is taken to be the
same for all batches and a mask for all heads, as models have them.
"""

from __future__ import annotations

import math

from flashgen.codegen.cost import Loop
from flashgen.core.compiled import Taken
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.tuning.sm import (
    EXP_PER_CLOCK,
    L2_OVER_DRAM,
    PART_PRODUCTS,
    SCHEDULERS,
    SMEM_BYTES_PER_CLOCK,
    matrix_rate,
    rates,
)

LOAD_LATENCY = 900
"""Cycles from a load of a tile to its arrival when it hits the L2."""

STEP_LATENCY = 300
MMA_ROWS = 16
ADDRESS_OPERATIONS = 8
ADDRESS_BYTES = 16
MASK_OPERATIONS = 3
FEATURE_OPERATIONS = {"softcap": 4, "alibi": 4}
"""Operations on each score beside the exponentials; both leave scores in natural units, which costs a product more."""

BROADCAST_OPERATIONS = {"": 0, "keys": 1, "full": 4}
"""Operations on each score for a bias or a mask of each kind: add or select, and where every score has an element of
its own two for the address and one to convert or compare it."""

SOFTCAP_EXPONENTIALS = 2
"""An exponential and a reciprocal for each score, both special functions."""

PART_OPERATIONS = {"tf32x3": 3, "bf16x6": 5}
"""Operations for the parts of each fp32 operand of a product: of every score, and of every element that is walked."""

MASK_BYTES = 1


class LoopModel:
    """The sums of the module's docstring for one loop of a workload, compiled for a device."""

    def __init__(self, loop: Loop, workload: Workload, device: Device, taken: Taken) -> None:
        self.loop, self.workload, self.device, self.taken = loop, workload, device, taken
        self.rates = rates(device)
        self.size = DTYPE_BYTES[workload.dtype]

    @property
    def ms(self) -> float:
        """Milliseconds of the kernel, its launch not included."""
        return max(self.compute_ms(), self.memory_ms())

    def compute_ms(self) -> float:
        """Time of the grid if memory were free."""
        loop, (full, masked) = self.loop, (self.loop.steps.full, self.loop.steps.masked)
        programs = len(full) * loop.heads
        slots = self.device.num_sms * self.taken.occupancy
        resident = min(self.taken.occupancy, -(-programs // self.device.num_sms))
        plain, extra = self._step_cycles(resident, masked=False), self._step_cycles(resident, masked=True)
        cycles = [loop.prologue + loop.repeats * (f * plain + m * extra) for f, m in zip(full, masked, strict=True)]
        total = sum(cycles) * loop.heads
        if max(cycles) == min(cycles):
            makespan = self._equal_waves(programs, slots, cycles[0])
        else:
            last = min(cycles) if loop.heavy_first else max(cycles)
            makespan = max(total / slots + last / 2, *cycles)
        return makespan / self.rates.cycles_per_ms

    def memory_ms(self) -> float:
        """Time of the bytes that device memory and the L2 move if arithmetic were free."""
        if not self.device.bandwidth_gbs:
            return 0.0
        w, loop = self.workload, self.loop
        tile = self._walked_tile_bytes() + 2 * loop.added_bytes  # what is added to is read and written
        tile += loop.rows * loop.columns * (_full(w.bias) * self.size + _full(w.mask) * MASK_BYTES)
        through_l2 = loop.steps.total * loop.heads * loop.repeats * tile
        per_gbs = 1.0 / (self.device.bandwidth_gbs * 1e6)
        return max(self._dram_bytes() * per_gbs, through_l2 * per_gbs / L2_OVER_DRAM)

    def _step_cycles(self, resident: int, *, masked: bool) -> float:
        """Cycles that one program needs for one step while `resident` programs share the SM."""
        loop = self.loop
        scores = loop.rows * loop.columns
        operations = (loop.score_operations + self._feature_operations() + (MASK_OPERATIONS if masked else 0)) * scores
        operations += loop.rows * loop.row_operations
        if loop.pointer_loads:
            operations += self._walked_tile_bytes() // ADDRESS_BYTES * ADDRESS_OPERATIONS
        operations += PART_OPERATIONS.get(loop.precision, 0) * (scores + loop.columns * loop.walked_columns)
        spilled = 2 * self.taken.spills * loop.warps * self.device.warp_size
        products = 2 * scores * loop.head_columns / matrix_rate(self.device, self._multiplied, loop.rows)
        operands = (self._smem_bytes() + spilled) / SMEM_BYTES_PER_CLOCK
        parts = (
            *((max(products, operands),) if loop.products_in_flight else (products, operands)),
            scores * (1 + self._tanh_functions()) / EXP_PER_CLOCK,
            operations / self.rates.lanes,
            loop.added_trips * loop.added_bytes / SMEM_BYTES_PER_CLOCK,
        )
        groups = resident * loop.warps / SCHEDULERS
        latency = STEP_LATENCY * (2 if loop.rows < MMA_ROWS * loop.warps else 1)
        busy: float = max(parts) + (sum(parts) + latency - max(parts)) / max(1.0, groups * loop.steps_in_flight)
        busy /= min(1.0, groups)  # fewer warps than schedulers leave some of them idle
        # programs take turns: each waits for the others' steps, during which its own loads travel
        waited = max(loop.stages - 1, 0) * busy * resident
        return resident * busy + max(0.0, LOAD_LATENCY - waited) / max(loop.stages, 1)

    @property
    def _multiplied(self) -> str:
        """What the rate of products depends on: the type of the tensors, or the parts of fp32 tiles."""
        return self.loop.precision if self.loop.precision in PART_PRODUCTS else self.workload.dtype

    def _tanh_functions(self) -> int:
        """Special functions of each score for the tanh of a softcap."""
        if not self.workload.softcap:
            return 0
        return 1 if self.loop.hardware_tanh else SOFTCAP_EXPONENTIALS

    def _feature_operations(self) -> int:
        """Operations that the workload's features add to every score."""
        w = self.workload
        found = sum(count for name, count in FEATURE_OPERATIONS.items() if getattr(w, name))
        return found + BROADCAST_OPERATIONS[w.bias] + BROADCAST_OPERATIONS[w.mask]

    def _walked_tile_bytes(self) -> int:
        return self.loop.columns * self.loop.walked_columns * self.size

    def _smem_bytes(self) -> float:
        """Bytes of a step that go through shared memory: stores of what it loads, and reads by those who multiply."""
        loop, walked = self.loop, self._walked_tile_bytes()
        own = loop.rows * loop.owned_columns * self.size
        exchanged = 2 * loop.rows * loop.columns * self.size if loop.through_smem else 0
        if self.rates.rows_per_read:
            return walked * (max(1, loop.rows // self.rates.rows_per_read) * loop.reads + 1) + own + exchanged
        if not loop.products_in_flight:  # warps keep rows of their own, and those in registers
            return walked * (max(1, loop.rows // max(MMA_ROWS, loop.rows // loop.warps)) * loop.reads + 1) + exchanged
        grids = [(rows, loop.warps // rows) for rows in (1, 2, 4, 8, 16) if loop.warps % rows == 0]
        reading = min(walked * loop.reads * rows + own * columns for rows, columns in grids)
        return walked + reading + exchanged

    def _equal_waves(self, programs: int, slots: int, cycles: float) -> float:
        whole, rest = divmod(programs, slots)
        return cycles * (whole + math.ceil(rest / self.device.num_sms) / self.taken.occupancy)

    def _dram_bytes(self) -> float:
        """Every tensor once; what is walked again for each wave if that of all running heads outgrows the L2."""
        w, loop = self.workload, self.loop
        blocks = len(loop.steps.full)
        group = loop.heads_per_group or loop.heads
        slots = self.device.num_sms * self.taken.occupancy
        running = max(group, -(-slots // blocks)) if group > 1 else -(-slots // blocks)
        sets = w.batch * w.nheads_k  # heads of keys: what the programs of one of them walk is shared
        held = max(1, min(running, loop.heads) * sets // loop.heads) * loop.walked_bytes / max(sets, 1)
        # behind a window only neighbouring blocks walk the same tiles, at nearly the same time
        again = held > 0.8 * self.device.l2_bytes > 0 and w.window_left is None
        waves = max(1.0, blocks * group / slots) if again else 1.0
        return float(loop.tensor_bytes + (waves - 1) * loop.walked_bytes + self._score_bytes())

    def _score_bytes(self) -> float:
        """A bias (nheads, Sq, Sk) and a mask (batch, Sq, Sk), of which the blocks that are walked are read."""
        w, loop = self.workload, self.loop
        elements = loop.steps.total * loop.rows * loop.columns
        bias = _full(w.bias) * w.nheads * self.size
        return float(elements * (bias + _full(w.mask) * w.batch * MASK_BYTES))


def _full(kind: str) -> bool:
    return kind == "full"
