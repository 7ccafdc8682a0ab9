"""The parameter list of a compiled kernel: what Triton made of a signature, read from its PTX.

| Triton | tensor descriptor on hardware that has them | after the last parameter |
|---|---|---|
| 3.6, 3.7, 3.9 | CUtensorMap (128 bytes), shape (rank x i32), strides (rank x i64) | two null scratch pointers |

The layout is not believed but compared with the PTX of every kernel; where it differs, as it may under another Triton,
the plan launches through Triton's own `CompiledKernel` instead.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from flashgen.codegen.family import Parameter
from flashgen.launch.tensor_maps import TENSOR_MAP_BYTES

SCALAR_BYTES = {"i32": 4, "i64": 8, "fp32": 4}
POINTER_BYTES = 8

_ENTRY = re.compile(r"\.visible\s+\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf])(\d+)\s+(?:\.ptr[^,\n]*?\s)?\w+(?:\[(\d+)\])?\s*(?:,|$)")


WORD_BYTES = 8
"""What a launch keeps for each parameter of a kernel, whatever its size."""

WORD_FORMATS = {"i32": "i4x", "i64": "q", "fp32": "f4x"}
"""How a number lies in such a word, as `struct` packs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parameters of a compiled kernel: its signature, and how many scratch pointers (unused, null) follow it."""

    parameters: tuple[Parameter, ...]
    trailing: int


@functools.cache
def is_descriptor(parameter: Parameter) -> bool:
    """Whether a parameter is a tensor descriptor."""
    return parameter.type.startswith("tensordesc")


@functools.cache
def element_of(parameter: Parameter) -> str:
    """The element type of a tensor descriptor: `bf16` of `tensordesc<bf16[1, 1, 128, 64]>`."""
    return parameter.type.split("<", 1)[1].split("[")[0]


@functools.cache
def block_of(parameter: Parameter) -> tuple[int, ...]:
    """The block of a tensor descriptor: the sizes in `tensordesc<bf16[1, 1, 128, 64]>`, a layout after them or not."""
    return tuple(int(size) for size in parameter.type.split("[")[1].split("]")[0].split(","))


def slot_sizes(parameter: Parameter) -> tuple[int, ...]:
    """The sizes in bytes of the kernel parameters that one parameter of a signature becomes."""
    if is_descriptor(parameter):
        rank = len(block_of(parameter))
        return (TENSOR_MAP_BYTES, *[4] * rank, *[8] * rank)
    if parameter.type.startswith("*"):
        return (POINTER_BYTES,)
    return (SCALAR_BYTES[parameter.type],)


def ptx_sizes(ptx: str) -> tuple[int, ...]:
    """The sizes in bytes of the parameters of the one entry of a PTX text; empty if it cannot be read."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        return ()
    found = _PARAM.findall(entry[1].strip())
    if len(found) != entry[1].count(".param"):
        return ()
    return tuple(int(bits) // 8 * int(count or 1) for _, bits, count in found)


def trailing_pointers(actual: tuple[int, ...], parameters: tuple[Parameter, ...]) -> int | None:
    """How many scratch pointers follow the parameters of a signature, or None if the layout is not the known one.

    `actual` is what `ptx_sizes` has read.
    """
    expected = tuple(size for parameter in parameters for size in slot_sizes(parameter))
    rest = actual[len(expected) :]
    if actual[: len(expected)] != expected or any(size != POINTER_BYTES for size in rest):
        return None
    return len(rest)
