"""What the families for wgmma and TMA have in common: warpgroups, barriers, tiles of a full swizzle, descriptors."""

from __future__ import annotations

from flashgen.codegen.head_parts import HeadPart, power_of_two
from flashgen.core.device import Device, find_device
from flashgen.core.workload import DTYPE_BYTES, Specialization

SM90 = find_device("h100")
"""All of sm90 have the same registers and shared memory: a kernel depends on no more of a device than that."""

NUM_SMS = 132
"""The most of any device of sm90."""

ROWS = 64
"""Query rows of a consumer warpgroup: the height of one wgmma tile. Two tiles a warpgroup were never faster."""

THREADS_PER_WARPGROUP = 128

REGISTER_STEP = 8
"""setmaxnreg moves the registers of a warpgroup in steps of eight a thread."""

MAX_REGISTERS = 248
"""The most that setmaxnreg may give a thread (255 less what does not divide by eight)."""

BARRIER_BYTES = 1024
"""Barriers, the next tile and alignment; 330 to 800 bytes were measured."""

NAMED_BARRIERS = 16
"""Barriers of a block in hardware (PTX: bar.sync 0 to 15)."""

FIRST_NAMED_BARRIER = 6
"""Triton takes 0, 1 and one for each role but the first, of which there are at most four."""


LEAST_COLUMNS = 64
"""Columns of a full swizzle: a head that lies in one part has no fewer."""

LEAST_HEAD_DIM = 40
"""Smaller heads than this would be padded to twice their size and more."""

MOST_HEAD_DIM = 256
"""Of larger ones the output of 64 rows leaves no registers for scores."""

HEAD_DIM_STEP = 8
"""Rows of a multiple of 16 bytes, for TMA."""


def why_not_wgmma(device: Device) -> str | None:
    """Why `device` cannot run kernels for wgmma and TMA, or None."""
    if not (device.has_wgmma and device.has_tma):
        return f"it needs sm90, not {device.arch}"
    return None


def why_not_head_dim(spec: Specialization) -> str | None:
    """Why heads of this size are left to the portable families, or None."""
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if not LEAST_HEAD_DIM <= size <= MOST_HEAD_DIM or size % HEAD_DIM_STEP:
            return f"its {name} is a multiple of 8 from {LEAST_HEAD_DIM} to {MOST_HEAD_DIM}, not {size}"
    return None


def block(head_dim: int) -> int:
    """Columns of a head in one part: the next power of two, at least the 64 of a full swizzle."""
    return max(LEAST_COLUMNS, power_of_two(head_dim))


def one_part(head_dim: int) -> tuple[HeadPart, ...]:
    """A head that lies in one part."""
    return (HeadPart(suffix="", start=0, size=head_dim, block=block(head_dim)),)


def widest_block(spec: Specialization) -> int:
    """Columns of the wider of both kinds of tiles."""
    return max(block(spec.head_dim), block(spec.head_dim_v))


def descriptor_type(dtype: str, *box: int) -> str:
    """The type of a descriptor in the signature of a Gluon kernel, which names the layout in shared memory as well.

    `box` is (rows, columns) of one head, or (heads, positions, columns) of several that share keys: these have an axis
    of their own behind that of the heads of keys, so that TMA clips at the end of a group.
    Rows of 128 bytes and more are swizzled in lines of 128, shorter ones in lines of 64: what
    `NVMMASharedLayout.get_default_for` says, written out because the table of families is read without Triton.
    """
    size = DTYPE_BYTES.get(dtype, 1)
    layout = (
        f"NVMMASharedLayout(swizzle_byte_width={min(128, box[-1] * size)}, element_bitwidth={8 * size}, "
        f"rank={2 + len(box)}, "
        "transposed=False, fp4_padded=False, cga_layout=[])"
    )
    return f"tensordesc<{dtype}[1, 1, {', '.join(map(str, box))}],{layout}>"
