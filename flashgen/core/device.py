"""`Device`: what the search and the look-ups need to know of a GPU, and a catalogue of known ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashgen.core import checks
from flashgen.core.architecture import Architecture, architecture
from flashgen.core.checks import check_fields
from flashgen.core.errors import DeviceError
from flashgen.core.names import meant
from flashgen.core.quoting import shown

MAX_NAME = 200
"""Characters of a name that a device is asked for by."""

MAX_SLUG = 40
"""Characters of a name in a folder's: that of a foreign device may be as long as it likes."""

MEMORY_CLASSES_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 180, 192, 256, 288)
"""Sizes that cards are sold with; the nearest one names a card whatever a driver reserves of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU model, without torch: a pure value. What it can do follows from its architecture.

    `identity` (architecture, number of SMs, memory class, and what sets it apart from the usual card of these) tells
    models apart in look-ups: H100 PCIe, H100 SXM, H200, its NVL card of 600 W and MIG slices differ in it. `name` is a
    label, of which only that it names a slice counts. Shared memory is in bytes, `bandwidth_gbs` in 1e9 bytes per
    second; `peak_tflops` is the dense bf16 matrix rate with fp32 accumulation (vendors' data sheets), 0 where it is not
    known. `power_w` is the power limit in watts that it is sold with, 0 where that is the usual one or is not known.
    """

    name: str
    arch: str
    num_sms: int
    memory_gb: int
    smem_per_block: int
    smem_per_sm: int
    regs_per_sm: int = 65536
    max_threads_per_sm: int = 2048
    warp_size: int = 32
    l2_bytes: int = 0
    bandwidth_gbs: float = 0.0
    peak_tflops: float = 0.0
    power_w: int = 0

    def __post_init__(self) -> None:
        check_fields(self, DeviceError)
        if not re.fullmatch(r"sm\d{2,3}|gfx[0-9a-f]{3,4}", self.arch):
            raise DeviceError(f"arch is like sm90 or gfx942, got {shown(self.arch)}")
        for field, least in _LEAST.items():
            if not least <= getattr(self, field) < math.inf:
                raise DeviceError(f"{field} must be at least {least}, got {getattr(self, field)}")

    @property
    def identity(self) -> str:
        """The key of look-ups, e.g. `sm90-132sm-141gb`, or `sm90-132sm-141gb-600w` of an unusual card."""
        slice_ = "-mig" if " MIG " in f"{self.name} " else ""
        return f"{self.usual_identity}{slice_}{f'-{self.power_w}w' if self.power_w else ''}"

    @property
    def usual_identity(self) -> str:
        """The identity of the usual card with these sizes, which all had before they were told apart."""
        return f"{self.arch}-{self.num_sms}sm-{self.memory_gb}gb"

    def may_use(self, other: Device) -> bool:
        """Whether records of `other` are of this device: of its identity, or of the usual card with its sizes."""
        return other.identity in (self.identity, self.usual_identity)

    @property
    def slug(self) -> str:
        """The name as a file stem, e.g. `nvidia_h200`."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    @property
    def folder(self) -> str:
        """The name of its folder among those of all devices: the slug of a catalogued one, else that and the identity.

        It is safe whatever the name is, and two devices that look-ups tell apart never share one.
        """
        if any((self.slug, self.identity) == (known.slug, known.identity) for known in CATALOGUE):
            return self.slug
        return "-".join(filter(None, (self.slug[:MAX_SLUG].strip("_"), self.identity)))

    @property
    def is_nvidia(self) -> bool:
        """Whether the backend is CUDA (else it is HIP)."""
        return self.arch.startswith("sm")

    @property
    def capability(self) -> int:
        """CUDA compute capability times ten, e.g. 90; 0 on AMD."""
        return int(self.arch[2:]) if self.is_nvidia else 0

    @property
    def architecture(self) -> Architecture:
        """What its architecture can do."""
        return architecture(self.arch, self.warp_size)

    @property
    def mma(self) -> str:
        """How its tensor cores multiply: mma, wgmma, tcgen05, mfma or wmma (`Architecture.mma`)."""
        return self.architecture.mma

    @property
    def has_wgmma(self) -> bool:
        """Whether warpgroups multiply from shared memory into registers, as on sm90 and nowhere else."""
        return self.architecture.mma == "wgmma"

    @property
    def has_warpgroup_mma(self) -> bool:
        """Whether tensor cores work for four warps together and read operands from shared memory."""
        return self.architecture.mma_rows_per_read > 0

    @property
    def has_async_copy(self) -> bool:
        """Whether loads go to shared memory beside the warps."""
        return self.architecture.has_async_copy

    @property
    def has_tma(self) -> bool:
        """Whether tensor descriptors are hardware."""
        return self.architecture.has_tma

    @property
    def has_tensor_memory(self) -> bool:
        """Whether accumulators lie in a memory of their own instead of in registers."""
        return self.architecture.has_tensor_memory

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start before the one ahead of it in its stream has ended."""
        return self.capability >= 90

    @property
    def has_tf32(self) -> bool:
        """Whether its tensor cores multiply TF32."""
        return self.architecture.has_tf32


_LEAST = {
    **dict.fromkeys(("num_sms", "memory_gb", "smem_per_block", "smem_per_sm", "regs_per_sm"), 1),
    **dict.fromkeys(("max_threads_per_sm", "warp_size"), 1),
    **dict.fromkeys(("l2_bytes", "bandwidth_gbs", "peak_tflops", "power_w"), 0),
}


def memory_class_gb(total_bytes: int) -> int:
    """The size a card is sold with, from the bytes that its driver reports."""
    gib = total_bytes / 2**30
    return min(MEMORY_CLASSES_GB, key=lambda size: abs(size - gib))


KB = 1024

_ROWS: tuple[tuple[str, str, int, int, int, int, int, int, int, float, float], ...] = (
    # name, arch, SMs, memory GB, smem/block, smem/SM, threads/SM, warp, L2 MB, GB/s, dense bf16 TFLOP/s
    ("NVIDIA A100", "sm80", 108, 80, 163 * KB, 164 * KB, 2048, 32, 40, 2039.0, 312.0),
    ("NVIDIA A100 40GB", "sm80", 108, 40, 163 * KB, 164 * KB, 2048, 32, 40, 1555.0, 312.0),
    ("NVIDIA RTX 3090", "sm86", 82, 24, 99 * KB, 100 * KB, 1536, 32, 6, 936.0, 71.0),
    ("NVIDIA RTX 4090", "sm89", 128, 24, 99 * KB, 100 * KB, 1536, 32, 72, 1008.0, 165.2),
    ("NVIDIA L40S", "sm89", 142, 48, 99 * KB, 100 * KB, 1536, 32, 96, 864.0, 362.0),
    ("NVIDIA H100", "sm90", 132, 80, 227 * KB, 228 * KB, 2048, 32, 50, 3350.0, 989.4),
    ("NVIDIA H100 PCIe", "sm90", 114, 80, 227 * KB, 228 * KB, 2048, 32, 50, 2039.0, 756.0),
    ("NVIDIA H200", "sm90", 132, 141, 227 * KB, 228 * KB, 2048, 32, 60, 4800.0, 989.4),
    ("NVIDIA B200", "sm100", 148, 180, 227 * KB, 228 * KB, 2048, 32, 126, 8000.0, 2250.0),
    ("NVIDIA RTX 5090", "sm120", 170, 32, 99 * KB, 100 * KB, 1536, 32, 96, 1792.0, 209.5),
    ("AMD MI300X", "gfx942", 304, 192, 64 * KB, 64 * KB, 2048, 64, 256, 5300.0, 1307.4),
    ("AMD RX 9060 XT", "gfx1200", 32, 16, 64 * KB, 64 * KB, 2048, 32, 32, 322.0, 103.0),
)

DRIVER_NAMES = {
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100 40GB",
    "NVIDIA GeForce RTX 3090": "NVIDIA RTX 3090",
    "NVIDIA GeForce RTX 4090": "NVIDIA RTX 4090",
    "NVIDIA GeForce RTX 5090": "NVIDIA RTX 5090",
    "AMD Instinct MI300X": "AMD MI300X",
    "AMD Radeon RX 9060 XT": "AMD RX 9060 XT",
}
"""What nvidia-smi, amd-smi and torch call catalogued cards whose names here are shorter: who copies a name from there
means these. Cards of other identities are not among them, as the A100 of 300 W."""

SOLD_POWER_W = {
    "NVIDIA A100-SXM4-80GB": 400,
    "NVIDIA A100 80GB PCIe": 300,
    "NVIDIA A100-SXM4-40GB": 400,
    "NVIDIA A100-PCIE-40GB": 250,
    "NVIDIA GeForce RTX 3090": 350,
    "NVIDIA GeForce RTX 4090": 450,
    "NVIDIA L40": 300,
    "NVIDIA L40S": 350,
    "NVIDIA H100 80GB HBM3": 700,
    "NVIDIA H100 PCIe": 350,
    "NVIDIA H200": 700,
    "NVIDIA H200 NVL": 600,
    "NVIDIA B200": 1000,
    "NVIDIA GeForce RTX 5090": 575,
}
"""The power limits in watts that cards are sold with (vendors' data sheets), by the names that their drivers report.
The driver of a card that is named here is not asked, which would delay the first call of a process."""

USUAL_POWER_W = {
    "sm80-108sm-80gb": 400,
    "sm80-108sm-40gb": 400,
    "sm86-82sm-24gb": 350,
    "sm89-128sm-24gb": 450,
    "sm89-142sm-48gb": 350,
    "sm90-132sm-80gb": 700,
    "sm90-114sm-80gb": 350,
    "sm90-132sm-141gb": 700,
    "sm100-148sm-180gb": 1000,
    "sm120-170sm-32gb": 575,
}
"""Of the catalogued cards, by their identities: a limit near it is not named in an identity."""

SAME_POWER = 0.05
"""Limits that are closer than this share are of one card."""


def unusual_power_w(device: Device, sold_w: int) -> int:
    """`Device.power_w` of a card that is sold with a limit of `sold_w` watts (0 if that is not known)."""
    usual = USUAL_POWER_W.get(device.usual_identity, 0)
    return 0 if usual and abs(sold_w / usual - 1) <= SAME_POWER else sold_w


CATALOGUE: tuple[Device, ...] = tuple(
    Device(
        name=name,
        arch=arch,
        num_sms=sms,
        memory_gb=memory,
        smem_per_block=block,
        smem_per_sm=sm,
        regs_per_sm=architecture(arch, warp).regs_per_sm,
        max_threads_per_sm=threads,
        warp_size=warp,
        l2_bytes=l2 * KB * KB,
        bandwidth_gbs=bandwidth,
        peak_tflops=peak,
    )
    for name, arch, sms, memory, block, sm, threads, warp, l2, bandwidth, peak in _ROWS
)
"""Known devices, from the vendors' public data sheets."""


def find_device(text: str) -> Device:
    """The catalogued device that `text` names: `h100`, `RTX 4090`, `sm_86`, `gfx942`, an identity or a driver's name.

    Raises:
        DeviceError: no catalogued device has that name; the message lists them.
    """
    return find_among(text, ())


def find_among(text: str, stored: Sequence[Device]) -> Device:
    """The catalogued device that `text` names, or else one of `stored`.

    Args:
        text: the name; case, and characters that are neither letters nor digits, do not count.
        stored: devices of databases, which are named in the same ways where no catalogued one is.

    Raises:
        DeviceError: no device has that name, or several stored ones have; the message lists them.
    """
    wanted = _bare(checks.text("a target", text, DeviceError, MAX_NAME))
    for device in CATALOGUE:
        if wanted in map(_bare, _names(device)):
            return device
    found = _stored(stored, text)
    if len(found) > 1:
        raise DeviceError(f"a target is one device, and {shown(text)} names several: {', '.join(sorted(found))}")
    if found:
        return next(iter(found.values()))
    catalogued = {device.identity for device in CATALOGUE}
    known = [f"{device.slug} ({device.arch})" for device in CATALOGUE]
    known += sorted({f"{each.identity} ({shown(each.name)})" for each in stored if each.identity not in catalogued})
    every = [name for device in (*CATALOGUE, *stored) for name in sorted(_names(device))]
    raise DeviceError(
        f"a target is one of {', '.join(known)}, or an architecture of them; got {shown(text)}{meant(text, every)}"
    )


def _stored(devices: Sequence[Device], text: str) -> dict[str, Device]:
    """Those that a text names, by identity: the one of this identity, else those of this name, else of one like it."""
    bare = _bare(text)
    rules: tuple[Callable[[Device], bool], ...] = (
        lambda device: device.identity == text,
        lambda device: device.name == text,
        lambda device: bare != "" and bare in map(_bare, _names(device)),
    )
    named = ({device.identity: device for device in devices if rule(device)} for rule in rules)
    return next(filter(None, named), {})


def _names(device: Device) -> set[str]:
    """What a device is asked for by."""
    short = device.slug.removeprefix("nvidia_").removeprefix("amd_")
    names = {device.slug, device.identity, device.arch, short, short.removeprefix("rtx_"), short.removeprefix("rx_")}
    return names | {reported for reported, name in DRIVER_NAMES.items() if name == device.name}


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())
