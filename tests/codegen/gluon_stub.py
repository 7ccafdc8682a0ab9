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


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """An address in an array of numbers, of which none outside is ever read."""

    values: list[int]
    place: Any = 0

    def __add__(self, steps: Any) -> Numbers:
        return Numbers(values=self.values, place=self.place + steps)

    def load(self, mask: Any, other: int) -> Any:
        if torch.as_tensor(self.place).dim() == 0:
            return self.values[_inside(int(self.place), len(self.values))] if mask is None or mask else other
        loaded = [self.values[_inside(at, len(self.values))] if m else other for at, m in _pairs(self.place, mask)]
        return torch.tensor(loaded)


def _inside(place: int, size: int) -> int:
    assert 0 <= place < size
    return place


def _pairs(place: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, bool]]:
    return list(zip(place.tolist(), mask.tolist(), strict=True))


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
    where = staticmethod(lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b))
    associative_scan = staticmethod(lambda x, axis, combine: x.cumsum(axis))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    constexpr = int
    SliceLayout = staticmethod(lambda axis, parent: None)
    pointer_type = staticmethod(lambda width: width)
    load = staticmethod(lambda pointer, mask=None, other=0: pointer.load(mask, other))

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        # towards zero, as C has it
        both = a + b - 1
        return both.div(b, rounding_mode="trunc") if isinstance(both, torch.Tensor) else int(both / b)

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(*map(torch.as_tensor, (a, b))) if _is_tensor(a, b) else min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(*map(torch.as_tensor, (a, b))) if _is_tensor(a, b) else max(a, b)

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


def _is_tensor(*values: object) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


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
