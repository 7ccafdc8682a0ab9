"""What one SM does in a cycle, by architecture: the figures behind the analytic model.

Rates come from the data-sheet peak, scaled by SUSTAINED because cards lower their clocks under such load (an H200
sustains 672 of 989 TFLOP/s in an 8192^3 bf16 product at its power limit).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashgen.core.device import Device

SUSTAINED = 0.68
SCHEDULERS = 4
EXP_PER_CLOCK = 16
SMEM_BYTES_PER_CLOCK = 128
L2_OVER_DRAM = 2.0
"""Bandwidth of the L2 over that of device memory; between 1.7 and 2.5 on the cards of the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Figures of one SM: nominal GHz, fp32 lanes, and rows that share one read of shared memory."""

    ghz: float
    lanes: int
    rows_per_read: int

    @property
    def cycles_per_ms(self) -> float:
        """Cycles of a millisecond under load."""
        return self.ghz * SUSTAINED * 1e6


def rates(device: Device) -> Rates:
    """The figures of a device's architecture, usual ones where it is not known."""
    own = device.architecture
    return Rates(ghz=own.boost_ghz, lanes=own.fp32_lanes, rows_per_read=own.mma_rows_per_read)


PART_PRODUCTS = {"tf32x3": ("tf32", 3), "bf16x6": ("bf16", 6)}
"""Of fp32 tiles that are multiplied in parts: what the parts are, and how many products of them there are."""


def matrix_rate(device: Device, dtype: str, rows: int) -> float:
    """Operations per clock of one SM: the power of two that fits the data sheet's peak.

    `rows` is the height of the tile that is multiplied: one lower than the unit is padded to it. `dtype` may also be
    one of `PART_PRODUCTS`.
    """
    if dtype in PART_PRODUCTS:
        part, count = PART_PRODUCTS[dtype]
        return matrix_rate(device, part, rows) / count
    own = rates(device)
    peak = device.peak_tflops * 1e3 / (device.num_sms * own.ghz)
    rate = float(2 ** round(math.log2(peak))) if peak > 1 else 1024.0
    if dtype == "fp32":
        rate = 2.0 * own.lanes  # no tensor core multiplies IEEE fp32
    elif dtype == "tf32":
        rate /= 2  # elements of twice the bytes
    if own.rows_per_read and rows < own.rows_per_read:
        rate *= rows / own.rows_per_read
    return rate
