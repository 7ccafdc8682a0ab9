"""An analytic model of a tiled forward kernel: what ranks candidates where nothing can be measured.

For one program (`block_m` query rows of one head) and one step (`block_n` keys) it counts cycles of a multiprocessor:

| part | cycles | source |
|---|---|---|
| matrix products | 2 block_m block_n (d + dv) / rate | data sheets; padding to the matrix unit's height counts |
| exponentials | block_m block_n / 16 | CUDA Programming Guide: 16 special functions a clock |
| other arithmetic | (5 block_m block_n + block_m dv) / fp32 lanes | scale, max, subtract, sum, pack; masks add 3 |
| shared memory | bytes / 128 | 128 bytes a clock; a key tile is written once, read per warpgroup (wgmma) or warp |
| spills | 2 x spilled bytes x threads / 128 | every step stores and reloads them |
| addresses | 8 operations for 16 bytes of a key tile | counted; none with tensor descriptors |
| waiting | 300 | chain of product, row maximum, barrier and product of one step: no resource, but time |
| | 600 | where warps share rows, so that row maxima and sums go through shared memory |

With u groups of four warps that run independently (of all programs on a multiprocessor) the parts overlap:
`busiest + (sum - busiest) / u`. A pipeline of s stages hides the latency of loads behind s - 1 steps of all programs.
The number of steps of every query block follows the causal mask; programs fill `num_sms x occupancy` slots in waves:
equal ones cost whole waves, unequal ones the mean and a tail that is short when heavy ones start first. Padding of
partial tiles counts as work. The result is the larger of that and the time of the bytes that device memory and the L2
move.

Rates come from the data-sheet peak, scaled by SUSTAINED because cards lower their clocks under such load (an H200
sustains 672 of 989 TFLOP/s in an 8192^3 bf16 product at its power limit). Absolute figures are rough; the ranking is
what it is for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from flashgen.codegen.portable_forward import FAMILY_ID, registers_needed, smem_needed
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.tuning.compile_pool import Compiled

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
        config: a config of a modelled family (`portable_forward`).
        device: where it would run; nothing needs to be present.
        compiled: what the kernel takes of a multiprocessor, from a compile or from `estimate`.

    Raises:
        TuningError: the family is not modelled, or the kernel does not fit the device.
    """
    if config.family != FAMILY_ID:
        raise TuningError(f"the analytic model covers {FAMILY_ID}, got {config.family}")
    if compiled.occupancy < 1:
        raise TuningError(f"a kernel must fit a multiprocessor to be predicted, got {compiled} for {config}")
    if not workload.flops:
        return LAUNCH_MS
    model = _Model(workload, config, device, compiled)
    return LAUNCH_MS + max(model.compute_ms(), model.memory_ms())


def estimate(workload: Workload, config: Config, device: Device) -> Compiled:
    """The least a kernel takes of a multiprocessor, before it is compiled: good enough to choose what to compile."""
    spec = workload.specialization
    registers = min(registers_needed(spec, config, device), config.integer("maxnreg") or 255)
    shared, warps = smem_needed(spec, config, device), config.integer("num_warps")
    threads = warps * device.warp_size
    fits = (
        device.regs_per_sm // (max(registers, 32) * threads),
        device.smem_per_sm // (shared + 1024),
        device.max_threads_per_sm // threads,
    )
    return Compiled(registers=registers, spills=0, shared_bytes=shared, occupancy=max(min(fits), 1))


class _Model:
    """The sums of the module's docstring for one workload, config and device."""

    def __init__(self, workload: Workload, config: Config, device: Device, compiled: Compiled) -> None:
        self.workload, self.config, self.device, self.compiled = workload, config, device, compiled
        self.block_m, self.block_n = config.integer("block_m"), config.integer("block_n")
        self.warps, self.stages = config.integer("num_warps"), config.integer("num_stages")
        self.rates = _RATES.get(device.arch, _OTHER_RATES)
        self.head_dims = _power_of_two(workload.head_dim) + _power_of_two(workload.head_dim_v)

    def compute_ms(self) -> float:
        """Time of the grid if memory were free."""
        full, masked = _steps(self.workload, self.block_m, self.block_n)
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
            last = min(cycles) if self.config["heavy_first"] else max(cycles)
            makespan = max(total / slots + last / 2, *cycles)
        return makespan / (self.rates.ghz * SUSTAINED * 1e6)

    def memory_ms(self) -> float:
        """Time of the bytes that device memory and the L2 move if arithmetic were free."""
        if not self.device.bandwidth_gbs:
            return 0.0
        full, masked = _steps(self.workload, self.block_m, self.block_n)
        size = DTYPE_BYTES[self.workload.dtype]
        tile = self.block_n * (self.workload.head_dim + self.workload.head_dim_v) * size
        through_l2 = (sum(full) + sum(masked)) * self.workload.batch * self.workload.nheads * tile
        per_gbs = 1.0 / (self.device.bandwidth_gbs * 1e6)
        return max(self._dram_bytes() * per_gbs, through_l2 * per_gbs / L2_OVER_DRAM)

    def _step_cycles(self, resident: int, *, masked: bool) -> float:
        """Cycles that one program needs for one step while `resident` programs share the multiprocessor."""
        scores = self.block_m * self.block_n
        operations = (SCORE_OPERATIONS + (MASK_OPERATIONS if masked else 0)) * scores
        operations += self.block_m * self.workload.head_dim_v
        if self.config["loads"] == "pointer":
            operations += self._key_tile_bytes() // ADDRESS_BYTES * ADDRESS_OPERATIONS
        spilled = 2 * self.compiled.spills * self.warps * self.device.warp_size
        parts = (
            2 * scores * self.head_dims / self._matrix_rate(),
            scores / EXP_PER_CLOCK,
            operations / self.rates.lanes,
            (self._smem_bytes() + spilled) / SMEM_BYTES_PER_CLOCK,
        )
        groups = resident * self.warps / SCHEDULERS
        latency = STEP_LATENCY * (2 if self.block_m < MMA_ROWS * self.warps else 1)
        busy = max(parts) + (sum(parts) + latency - max(parts)) / max(1.0, groups)
        busy /= min(1.0, groups)  # fewer warps than schedulers leave some of them idle
        # programs take turns: each waits for the others' steps, during which its own loads travel
        waited = max(self.stages - 1, 0) * busy * resident
        return resident * busy + max(0.0, LOAD_LATENCY - waited) / max(self.stages, 1)

    def _matrix_rate(self) -> float:
        """Operations per clock of one multiprocessor: the power of two that fits the data sheet's peak."""
        peak = self.device.peak_tflops * 1e3 / (self.device.num_sms * self.rates.ghz)
        rate = float(2 ** round(math.log2(peak))) if peak > 1 else 1024.0
        if self.workload.dtype == "fp32":
            rate = 2.0 * self.rates.lanes  # no matrix unit multiplies IEEE fp32
        wide = self.rates.rows_per_read
        if wide and self.block_m < wide:  # the tile is padded to the unit's height
            rate *= self.block_m / wide
        return rate

    def _key_tile_bytes(self) -> int:
        return self.block_n * self.head_dims * DTYPE_BYTES[self.workload.dtype]

    def _smem_bytes(self) -> float:
        size = DTYPE_BYTES[self.workload.dtype]
        rows = self.rates.rows_per_read or max(16, self.block_m // self.warps)
        readers = max(1, self.block_m // rows)
        query = self.block_m * _power_of_two(self.workload.head_dim) * size if self.rates.rows_per_read else 0
        return self._key_tile_bytes() * (readers + 1) + query

    def _equal_waves(self, programs: int, slots: int, cycles: float) -> float:
        whole, rest = divmod(programs, slots)
        return cycles * (whole + math.ceil(rest / self.device.num_sms) / self.compiled.occupancy)

    def _dram_bytes(self) -> float:
        """Every tensor once; keys and values again for each wave if those of all running heads outgrow the L2."""
        w = self.workload
        keys = w.batch * w.nheads_k * w.seqlen_k * (w.head_dim + w.head_dim_v) * DTYPE_BYTES[w.dtype]
        blocks = -(-w.seqlen_q // self.block_m)
        group = self.config.integer("heads_per_group") or w.batch * w.nheads
        slots = self.device.num_sms * self.compiled.occupancy
        running = max(group, -(-slots // blocks)) if group > 1 else -(-slots // blocks)
        heads_k = max(1, min(running, w.batch * w.nheads) * w.nheads_k // w.nheads)
        held = heads_k * keys / max(w.batch * w.nheads_k, 1)
        waves = max(1.0, blocks * group / slots) if held > 0.8 * self.device.l2_bytes > 0 else 1.0
        return w.bytes + (waves - 1) * keys


@functools.lru_cache(maxsize=256)
def _steps(w: Workload, block_m: int, block_n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Unmasked and masked steps of every query block of one head."""
    offset = w.seqlen_k - w.seqlen_q
    full, masked = [], []
    for start in range(0, w.seqlen_q, block_m):
        last_row = min(start + block_m, w.seqlen_q) - 1
        seen = min(max(last_row + offset + 1, 0), w.seqlen_k) if w.causal else w.seqlen_k
        clear = min(max(start + offset + 1, 0), w.seqlen_k) if w.causal else w.seqlen_k
        full.append(clear // block_n)
        masked.append(-(-seen // block_n) - clear // block_n)
    return tuple(full), tuple(masked)


def _power_of_two(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())
