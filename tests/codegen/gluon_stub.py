"""Functions of a rendered Gluon kernel on this machine's CPU: those that only compute, with torch's tensors.

What a kernel does with memory and roles is for a GPU; which keys it walks is arithmetic, and Triton's interpreter does
not run Gluon.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.codegen.build import load_module
from flashgen.codegen.render import KernelSource


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """An address in a tensor of bytes, and the bytes of what it points to."""

    memory: torch.Tensor
    place: Any = 0
    width: int = 1

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(memory=self.memory, place=self.place + steps * self.width, width=self.width)

    def to(self, width: int, *, bitcast: bool) -> Pointer:
        assert bitcast
        return Pointer(memory=self.memory, place=self.place, width=width)

    def load(self, mask: torch.Tensor, other: int) -> torch.Tensor:
        """Little-endian numbers; what `mask` leaves out is not touched, wherever it is."""
        assert bool(((self.place >= 0) & (self.place + self.width <= self.memory.numel()))[mask].all())
        assert bool((self.place % self.width == 0)[mask].all())
        places = torch.where(mask, self.place, 0)
        found = sum(
            self.memory.long()[(places + i).clamp_max(self.memory.numel() - 1)] << 8 * i for i in range(self.width)
        )
        return torch.where(mask, found, other)


class Tile:
    """A tile in shared memory (rows, columns) that other warpgroups write to: every load finds what TMA left there."""

    def __init__(self, *, rows: torch.Tensor) -> None:
        self._loaded, self.written, self._first = rows, torch.full_like(rows, torch.inf), 0

    def slice(self, first: int, count: int) -> Tile:
        part = copy.copy(self)
        part._first, part._loaded = first, self._loaded[first : first + count]
        return part

    def load(self, layout: object) -> torch.Tensor:
        return self._loaded

    def store(self, rows: torch.Tensor) -> None:
        self.written[self._first : self._first + len(rows)] = rows


class Gluon:
    """What stands for `gl`."""

    int32, int64, uint32 = torch.int64, torch.int64, 4

    arange = staticmethod(lambda start, end, layout=None: torch.arange(start, end))
    static_range = staticmethod(range)
    full = staticmethod(lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype))
    zeros = staticmethod(lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype))
    where = staticmethod(torch.where)
    sum = staticmethod(lambda x, axis: x.sum(axis))
    cdiv = staticmethod(lambda a, b: int((a + b - 1) / b))  # towards zero, as C has it
    SliceLayout = staticmethod(lambda axis, parent: None)
    pointer_type = staticmethod(lambda width: width)
    load = staticmethod(lambda pointer, mask, other: pointer.load(mask, other))

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(a, b) if isinstance(a, torch.Tensor) else min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(a, b) if isinstance(a, torch.Tensor) else max(a, b)

    @staticmethod
    def min(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amin(axis)

    @staticmethod
    def max(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amax(axis)

    @staticmethod
    def inline_asm_elementwise(asm: str, constraints: str, args: list[torch.Tensor], **_: object) -> Any:
        """The one piece of PTX of these functions: zeros at either end of 32 bits, and the bits that are set."""
        assert asm == BIT_COUNTS
        words = [int(word) for word in args[0].flatten()]
        low = [32 if word == 0 else (word & -word).bit_length() - 1 for word in words]
        high = [32 - word.bit_length() for word in words]
        counts = (low, high, [word.bit_count() for word in words])
        return tuple(torch.tensor(found).reshape(args[0].shape) for found in counts)


BIT_COUNTS = "{ .reg .b32 t, u; brev.b32 t, $3; popc.b32 u, $3; clz.b32 $1, $3; clz.b32 $0, t; mov.b32 $2, u; }"


def functions(source: KernelSource, *names: str) -> list[Any]:
    """These functions of a rendered kernel, as Python's own."""
    module = load_module(source)
    constants = {name: getattr(value, "value", value) for name, value in vars(module).items() if name.isupper()}
    found = [node for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
    space: dict[str, Any] = {**constants, "gl": Gluon}
    space |= dict.fromkeys(("fence_async_shared", "warpgroup_barrier"), lambda: None)
    exec(compile(ast.Module(body=list(found), type_ignores=[]), "<rendered>", "exec"), space)
    return [space[name] for name in names]
