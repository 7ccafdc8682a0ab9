"""`Architecture`: what the GPUs of one architecture can do. A new one is a row here; nothing else compares names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.core.errors import DeviceError

MMA_ROWS = {"": 0, "mma": 0, "wgmma": 64, "tcgen05": 128, "mfma": 0, "wmma": 0}
"""The kinds of tensor cores, and the rows that one read of a tile in shared memory serves: 0 where they multiply from
registers, which each warp loads for itself."""

OTHER_GHZ = 1.8

OTHER_MMA_FLOPS = 32768
OTHER_BANDWIDTH_GBS = 32000.0
"""Of an architecture without a row: more than any row has, because nothing is known that bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What kernels and the analytic model ask of an architecture.

    Attributes:
        name: as in `Device.arch`: `sm90`, `gfx942`.
        mma: how its tensor cores multiply: `mma` (a warp, from registers), `wgmma` (a warpgroup, from shared memory),
            `tcgen05` (into tensor memory), `mfma` and `wmma` (AMD's CDNA and RDNA); empty for none that kernels use.
        has_async_copy: whether loads go to shared memory beside the warps (`cp.async`).
        has_tma: whether tensor descriptors are hardware.
        has_tensor_memory: whether accumulators lie outside of the registers.
        has_tf32: whether its tensor cores multiply TF32.
        regs_per_sm: 32-bit registers of an SM (or compute unit).
        regs_per_thread: the most that one thread can have.
        boost_ghz: the clock of the data sheet's peak.
        fp32_lanes: fp32 operations of an SM in a clock, a multiply-add counted once.
        mma_flops: dense bf16 operations of an SM's tensor cores in a clock, a multiply-add counted twice: of the
            fastest card, for some sell with half of it.
        bandwidth_gbs: of the card with the fastest memory, 1e9 bytes per second.
    """

    name: str
    mma: str
    has_async_copy: bool = False
    has_tma: bool = False
    has_tensor_memory: bool = False
    has_tf32: bool = False
    regs_per_sm: int = 65536
    regs_per_thread: int = 255
    boost_ghz: float = OTHER_GHZ
    fp32_lanes: int = 64
    mma_flops: int = OTHER_MMA_FLOPS
    bandwidth_gbs: float = OTHER_BANDWIDTH_GBS

    def __post_init__(self) -> None:
        if self.mma not in MMA_ROWS:
            raise DeviceError(f"mma is one of {', '.join(filter(None, MMA_ROWS))} or empty, got {self.mma!r}")

    @property
    def mma_rows_per_read(self) -> int:
        """Rows of a product that share one read of its operands from shared memory; 0 where warps read for themselves.

        Such tensor cores work for the four warps of a warpgroup together.
        """
        return MMA_ROWS[self.mma]


_SM80 = Architecture(name="sm80", mma="mma", has_async_copy=True, has_tf32=True, boost_ghz=1.41)
_CDNA = Architecture(name="", mma="mfma", regs_per_thread=512)
_RDNA = Architecture(name="", mma="wmma")

_ROWS = (
    replace(_SM80, mma_flops=2048, bandwidth_gbs=2039.0),
    replace(_SM80, name="sm86", fp32_lanes=128, boost_ghz=1.70, mma_flops=1024, bandwidth_gbs=1008.0),
    replace(_SM80, name="sm89", fp32_lanes=128, boost_ghz=2.52, mma_flops=1024, bandwidth_gbs=1008.0),
    replace(
        _SM80,
        name="sm90",
        mma="wgmma",
        has_tma=True,
        fp32_lanes=128,
        boost_ghz=1.83,
        mma_flops=4096,
        bandwidth_gbs=4900.0,
    ),
    replace(
        _SM80,
        name="sm100",
        mma="tcgen05",
        has_tma=True,
        has_tensor_memory=True,
        fp32_lanes=128,
        boost_ghz=1.85,
        mma_flops=8192,
        bandwidth_gbs=8000.0,
    ),
    replace(_SM80, name="sm120", has_tma=True, fp32_lanes=128, boost_ghz=2.41, mma_flops=1024, bandwidth_gbs=1792.0),
    replace(
        _CDNA,
        name="gfx942",
        has_tf32=True,
        regs_per_sm=131072,
        fp32_lanes=128,
        boost_ghz=2.10,
        mma_flops=2048,
        bandwidth_gbs=6000.0,
    ),
    replace(
        _RDNA,
        name="gfx1200",
        regs_per_sm=98304,
        fp32_lanes=128,
        boost_ghz=3.13,
        mma_flops=1024,
        bandwidth_gbs=645.0,
    ),
)

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}
"""Known architectures by name, from the vendors' data sheets and programming guides."""


def architecture(name: str, warp_size: int) -> Architecture:
    """The row of an architecture; of one without a row, what all of its vendor's have that are as new.

    `warp_size` tells CDNA (64) from RDNA (32).
    """
    known = ARCHITECTURES.get(name)
    if known is not None:
        return known
    if not name.startswith("sm"):
        return replace(_CDNA if warp_size == 64 else _RDNA, name=name)
    capability = int(name[2:])
    if capability < 80:
        return Architecture(name=name, mma="", has_tf32=True)
    return replace(_SM80, name=name, has_tma=capability >= 90, boost_ghz=OTHER_GHZ)
