"""An analytic model of a tiled forward kernel: what ranks candidates where nothing can be measured.

For one program (`block_m` query rows of one head) and one step (`block_n` keys) it counts cycles of a multiprocessor:

| part | cycles | source |
|---|---|---|
| matrix products | 2 block_m block_n (d + dv) / rate | data sheets; padding to the matrix unit's height counts |
| exponentials | block_m block_n / 16 | CUDA Programming Guide: 16 special functions a clock; a soft cap adds 2 |
| other arithmetic | (5 block_m block_n + block_m dv) / fp32 lanes | scale, max, subtract, sum, pack; masks add 3, |
| | | and the score's own features what FEATURE_OPERATIONS counts |
| shared memory | bytes / 128 | 128 bytes a clock; a key tile is written once, read per warpgroup (wgmma) or warp |
| spills | 2 x spilled bytes x threads / 128 | every step stores and reloads them |
| addresses | 8 operations for 16 bytes of a key tile | counted; none with tensor descriptors |
| | 2 operations for each element of a bias or mask | loads of a tile in the layout of the scores are narrow |
| waiting | 300 | chain of product, row maximum, barrier and product of one step: no resource, but time |
| | 600 | where warps share rows, so that row maxima and sums go through shared memory |

With u groups of four warps that run independently (of all programs on a multiprocessor; twice as many where products of
the next step run during the softmax of this one) the parts overlap: `busiest + (sum - busiest) / u`. A pipeline of s
stages hides the latency of loads behind s - 1 steps of all programs. The number of steps of every query block follows
the causal mask and the window (`steps.py`); programs fill `num_sms x occupancy` slots in waves: equal ones cost whole
waves, unequal ones the mean and a tail that is short when heavy ones start first. Padding of partial tiles counts as
work. The result is the larger of that and the time of the bytes that device memory and the L2 move; a bias is taken to
be the same for all batches and a mask for all heads, as models have them.

Rates come from the data-sheet peak, scaled by SUSTAINED because cards lower their clocks under such load (an H200
sustains 672 of 989 TFLOP/s in an 8192^3 bf16 product at its power limit). Absolute figures are rough; the ranking is
what it is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.tuning.compile_pool import Compiled
from flashgen.tuning.steps import steps
from flashgen.tuning.tiling import least_resources, tiling

SUSTAINED = 0.68
SCHEDULERS = 4
EXP_PER_CLOCK = 16
SMEM_BYTES_PER_CLOCK = 128
LOAD_LATENCY = 900
"""Cycles from a load of a key tile to its arrival when it hits the L2."""

STEP_LATENCY = 300
MMA_ROWS = 16
ADDRESS_OPERATIONS = 8
ADDRESS_BYTES = 16
PROLOGUE = 3000
"""Cycles of a program outside of its loop: launch, the query tile's load, the division and the store."""

LAUNCH_MS = 0.003
L2_OVER_DRAM = 2.0
"""Bandwidth of the L2 over that of device memory; between 1.7 and 2.5 on the cards of the catalogue."""

MASK_OPERATIONS = 3
SCORE_OPERATIONS = 5
FEATURE_OPERATIONS = {"softcap": 4, "alibi": 4}
"""Operations on each score beside the exponentials; both leave scores in natural units, which costs a product more."""

BROADCAST_OPERATIONS = {"": 0, "keys": 1, "full": 4}
"""Operations on each score for a bias or a mask of each kind: add or select, and where every score has an element of
its own two for the address and one to convert or compare it."""

SOFTCAP_EXPONENTIALS = 2
"""An exponential and a reciprocal for each score, both special functions."""

MASK_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Figures of one multiprocessor: nominal GHz, fp32 lanes, and rows that share one read of shared memory."""

    ghz: float
    lanes: int
    rows_per_read: int


_RATES = {
    # the boost clocks of the data sheets' peaks; wgmma reads a tile per 64 rows, tcgen05 per 128, mma per warp
    "sm80": _Rates(ghz=1.41, lanes=64, rows_per_read=0),
    "sm86": _Rates(ghz=1.70, lanes=128, rows_per_read=0),
    "sm89": _Rates(ghz=2.52, lanes=128, rows_per_read=0),
    "sm90": _Rates(ghz=1.83, lanes=128, rows_per_read=64),
    "sm100": _Rates(ghz=1.85, lanes=128, rows_per_read=128),
    "sm120": _Rates(ghz=2.41, lanes=128, rows_per_read=0),
    "gfx942": _Rates(ghz=2.10, lanes=128, rows_per_read=0),
    "gfx1200": _Rates(ghz=3.13, lanes=128, rows_per_read=0),
}
_OTHER_RATES = _Rates(ghz=1.8, lanes=64, rows_per_read=0)


def predict_ms(workload: Workload, config: Config, device: Device, compiled: Compiled) -> float:
    """Milliseconds that the model expects of `config` on `workload`.

    Args:
        workload: a forward problem.
        config: a config of a modelled family (`tiling.is_modelled`).
        device: where it would run; nothing needs to be present.
        compiled: what the kernel takes of a multiprocessor, from a compile or from `estimate`.

    Raises:
        TuningError: the family is not modelled, or the kernel does not fit the device.
    """
    if compiled.occupancy < 1:
        raise TuningError(f"a kernel must fit a multiprocessor to be predicted, got {compiled} for {config}")
    if not workload.flops:
        return LAUNCH_MS
    model = _Model(workload, config, device, compiled)
    return LAUNCH_MS + max(model.compute_ms(), model.memory_ms())


def estimate(workload: Workload, config: Config, device: Device) -> Compiled:
    """The least a kernel takes of a multiprocessor, before it is compiled: good enough to choose what to compile."""
    return least_resources(workload.specialization, config, device)


class _Model:
    """The sums of the module's docstring for one workload, config and device."""

    def __init__(self, workload: Workload, config: Config, device: Device, compiled: Compiled) -> None:
        self.workload, self.device, self.compiled = workload, device, compiled
        self.tile = tiling(workload.specialization, config)
        self.block_m, self.block_n = self.tile.block_m, self.tile.block_n
        self.rates = _RATES.get(device.arch, _OTHER_RATES)
        self.head_dims = self.tile.query_columns + self.tile.value_columns
        self.steps = steps(workload, self.block_m, self.block_n)

    def compute_ms(self) -> float:
        """Time of the grid if memory were free."""
        full, masked = self.steps.full, self.steps.masked
        heads = self.workload.batch * self.workload.nheads
        programs = len(full) * heads
        slots = self.device.num_sms * self.compiled.occupancy
        resident = min(self.compiled.occupancy, -(-programs // self.device.num_sms))
        plain, extra = self._step_cycles(resident, masked=False), self._step_cycles(resident, masked=True)
        cycles = [PROLOGUE + f * plain + m * extra for f, m in zip(full, masked, strict=True)]
        total = sum(cycles) * heads
        if max(cycles) == min(cycles):
            makespan = self._equal_waves(programs, slots, cycles[0])
        else:
            last = min(cycles) if self.tile.heavy_first else max(cycles)
            makespan = max(total / slots + last / 2, *cycles)
        return makespan / (self.rates.ghz * SUSTAINED * 1e6)

    def memory_ms(self) -> float:
        """Time of the bytes that device memory and the L2 move if arithmetic were free."""
        if not self.device.bandwidth_gbs:
            return 0.0
        w, size = self.workload, DTYPE_BYTES[self.workload.dtype]
        tile = self.block_n * (w.head_dim + w.head_dim_v) * size
        tile += self.block_m * self.block_n * (_full(w.bias) * size + _full(w.mask) * MASK_BYTES)
        through_l2 = self.steps.total * w.batch * w.nheads * tile
        per_gbs = 1.0 / (self.device.bandwidth_gbs * 1e6)
        return max(self._dram_bytes() * per_gbs, through_l2 * per_gbs / L2_OVER_DRAM)

    def _step_cycles(self, resident: int, *, masked: bool) -> float:
        """Cycles that one program needs for one step while `resident` programs share the multiprocessor."""
        scores = self.block_m * self.block_n
        operations = (SCORE_OPERATIONS + self._feature_operations() + (MASK_OPERATIONS if masked else 0)) * scores
        operations += self.block_m * self.workload.head_dim_v
        if self.tile.pointer_loads:
            operations += self._key_tile_bytes() // ADDRESS_BYTES * ADDRESS_OPERATIONS
        spilled = 2 * self.compiled.spills * self.tile.warps * self.device.warp_size
        parts = (
            2 * scores * self.head_dims / self._matrix_rate(),
            scores * (1 + (SOFTCAP_EXPONENTIALS if self.workload.softcap else 0)) / EXP_PER_CLOCK,
            operations / self.rates.lanes,
            (self._smem_bytes() + spilled) / SMEM_BYTES_PER_CLOCK,
        )
        groups = resident * self.tile.warps / SCHEDULERS
        latency = STEP_LATENCY * (2 if self.block_m < MMA_ROWS * self.tile.warps else 1)
        busy = max(parts) + (sum(parts) + latency - max(parts)) / max(1.0, groups * self.tile.steps_in_flight)
        busy /= min(1.0, groups)  # fewer warps than schedulers leave some of them idle
        # programs take turns: each waits for the others' steps, during which its own loads travel
        waited = max(self.tile.stages - 1, 0) * busy * resident
        return resident * busy + max(0.0, LOAD_LATENCY - waited) / max(self.tile.stages, 1)

    def _feature_operations(self) -> int:
        """Operations that the workload's features add to every score."""
        w = self.workload
        found = sum(count for name, count in FEATURE_OPERATIONS.items() if getattr(w, name))
        return found + BROADCAST_OPERATIONS[w.bias] + BROADCAST_OPERATIONS[w.mask]

    def _matrix_rate(self) -> float:
        """Operations per clock of one multiprocessor: the power of two that fits the data sheet's peak."""
        peak = self.device.peak_tflops * 1e3 / (self.device.num_sms * self.rates.ghz)
        rate = float(2 ** round(math.log2(peak))) if peak > 1 else 1024.0
        if self.workload.dtype == "fp32":
            rate = 2.0 * self.rates.lanes  # no matrix unit multiplies IEEE fp32
        elif self.workload.dtype == "tf32":
            rate /= 2  # elements of twice the bytes
        wide = self.rates.rows_per_read
        if wide and self.block_m < wide:  # the tile is padded to the unit's height
            rate *= self.block_m / wide
        return rate

    def _key_tile_bytes(self) -> int:
        return self.block_n * self.head_dims * DTYPE_BYTES[self.workload.dtype]

    def _smem_bytes(self) -> float:
        size = DTYPE_BYTES[self.workload.dtype]
        rows = self.rates.rows_per_read or max(16, self.block_m // self.tile.warps)
        readers = max(1, self.block_m // rows)
        query = self.block_m * self.tile.query_columns * size if self.rates.rows_per_read else 0
        return self._key_tile_bytes() * (readers + 1) + query

    def _equal_waves(self, programs: int, slots: int, cycles: float) -> float:
        whole, rest = divmod(programs, slots)
        return cycles * (whole + math.ceil(rest / self.device.num_sms) / self.compiled.occupancy)

    def _dram_bytes(self) -> float:
        """Every tensor once; keys and values again for each wave if those of all running heads outgrow the L2."""
        w = self.workload
        keys = w.batch * w.nheads_k * w.seqlen_k * (w.head_dim + w.head_dim_v) * DTYPE_BYTES[w.dtype]
        blocks = -(-w.seqlen_q // self.block_m)
        group = self.tile.heads_per_group or w.batch * w.nheads
        slots = self.device.num_sms * self.compiled.occupancy
        running = max(group, -(-slots // blocks)) if group > 1 else -(-slots // blocks)
        heads_k = max(1, min(running, w.batch * w.nheads) * w.nheads_k // w.nheads)
        held = heads_k * keys / max(w.batch * w.nheads_k, 1)
        # behind a window only neighbouring blocks of queries read the same keys, at nearly the same time
        again = held > 0.8 * self.device.l2_bytes > 0 and w.window_left is None
        waves = max(1.0, blocks * group / slots) if again else 1.0
        return w.bytes + (waves - 1) * keys + self._score_bytes()

    def _score_bytes(self) -> float:
        """A bias (nheads, Sq, Sk) and a mask (batch, Sq, Sk), of which the blocks that are walked are read."""
        w = self.workload
        elements = self.steps.total * self.block_m * self.block_n
        bias = _full(w.bias) * w.nheads * DTYPE_BYTES[w.dtype]
        return float(elements * (bias + _full(w.mask) * w.batch * MASK_BYTES))


def _full(kind: str) -> bool:
    return kind == "full"
