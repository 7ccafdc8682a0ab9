"""Calls of many kinds in turns on an imagined GPU: each is launched as where no other call was before it.

Kernels have the parameters of the real ones, and nothing is compiled. What the driver would have read is kept, with
tensors by their names in the place of addresses.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import KernelSpec
from flashgen.codegen.render import KernelSource
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.launch import counters, decode_passes, decode_plan
from flashgen.runtime.decode import plans
from flashgen.runtime.ops import append, helpers, merging, serve
from tests.fakes.driver import FakeDriver, Launched
from tests.fakes.gpu_zero import on_gpu_zero
from tests.fakes.uncompiled import compile_nothing, part_of

Tensor = torch.Tensor
Results = Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call at some sizes: its tensors, and what makes it, which gives the results of one pass after the other."""

    tensors: Results
    passes: Callable[[], Iterable[Results]]
    stream: int = 7


Kind = Callable[[int], Call]
"""Calls that differ in sizes alone, by a number that says which."""

Change = Callable[[Tensor], Tensor]

OTHER_DTYPES = {
    torch.bfloat16: torch.float16,
    torch.float32: torch.float16,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
    torch.bool: torch.uint8,
}


def _in_another_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(OTHER_DTYPES[tensor.dtype])


def _with_one_more(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(len(tensor) + 1, *tensor.shape[1:])


def _with_two_more_columns(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 2)


def _with_gaps(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]


def _at_odd_steps(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)[..., :-1]


def _at_an_odd_address(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)


CHANGES: dict[str, Change] = {
    "in another dtype": _in_another_dtype,
    "with one more": _with_one_more,
    "with two more columns": _with_two_more_columns,
    "with gaps": _with_gaps,
    "at odd steps": _at_odd_steps,
    "at an odd address": _at_an_odd_address,
}
"""What may be different about one tensor of a call alone, be it an error."""


def changed(*names: str, **given: Any) -> dict[str, dict[str, Any]]:
    """The arguments of a call, and of those of which one tensor is another one: that is what `changes` says by name."""
    found = {f"{name} {words}": {**given, "changes": {name: one}} for name in names for words, one in CHANGES.items()}
    return {"unchanged": given, **found}


@dataclass
class Turns(FakeDriver):
    """The driver, and what was compiled."""

    both_ways: bool = False
    compiled: list[str] = field(default_factory=list)
    stream: int = 0

    def make(self, kernels: Iterable[KernelSpec], device: Device, title: str) -> CompiledKernel:
        """Kernels whose names say what was compiled in."""
        parts = [part_of(kernel, f"{kernel.entry} of {title}", title) for kernel in kernels]
        self.named |= {part.handle.hash: part.kernel.parameters for part in parts}
        self.compiled.append(title)
        return CompiledKernel(source=KernelSource(entry="imagined", text=""), device=device, parts=tuple(parts))

    def told(self, one: Launched, named: Mapping[int, str]) -> tuple[str, object]:
        """The kernel of a launch, and what it read, with names for addresses."""
        values = dict(one.values)
        for parameter in self.kernels[one.function]:
            if parameter.type.startswith(("*", "tensordesc")):
                values[parameter.name] = named.get(values[parameter.name], bool(values[parameter.name]))
        return self.loaded[one.function - 0x6001][1].decode(), (values, one.grid, one.stream, one.attributes)

    def launched(self, call: Call) -> list[object]:
        """What a call launches, and how its results are laid out; or the error that it raises."""
        found: list[object] = []
        before, self.stream = len(self.launches), call.stream
        try:
            for results in call.passes():
                known = {**call.tensors, **results}
                named = {one.data_ptr(): name for name, one in known.items() if one is not None and one.numel()}
                found += [self.told(one, named) for one in self.launches[before:]]
                found += [(name, _layout(one)) for name, one in results.items() if one is not None]
                before = len(self.launches)
        except FlashgenError as error:
            found.append(f"{type(error).__name__}: {error}")
        return found

    def check(self, kinds: Mapping[str, Kind], sizes: Iterable[int], *, repeats: int = 2) -> None:
        """Call all kinds in turns, at one size after the other; and each alone, behind the first one.

        What is remembered of few kinds alone is there where there are two. At the second size the first one comes
        behind the other; `both_ways` begins with either.

        Raises:
            AssertionError: a call is launched in another way than where nothing is remembered, or its tensors are kept.
        """
        sizes, names, given = tuple(sizes), tuple(kinds), list[weakref.ref[Tensor]]()
        expected = {}
        for name, kind in kinds.items():
            for size in sizes:
                forget()
                expected[name, size] = self.launched(kind(size))
        pairs = [(names[0], name) for name in names[1:]]
        orders = [names, *pairs]
        for turns in [*orders, *(each[::-1] for each in orders)] if self.both_ways else orders:
            forget()
            for size in sizes:
                for name in turns:
                    for _ in range(repeats):
                        call = kinds[name](size)
                        given += (weakref.ref(one) for one in call.tensors.values() if one is not None)
                        _compare(self.launched(call), expected[name, size], f"{name} at {size} of {turns}")
            del call
            if turns is names:
                gc.collect()  # errors are in cycles
                if any(one() is not None for one in given):
                    raise AssertionError(f"what is remembered of {turns} keeps their tensors")
            given.clear()


def forget() -> None:
    """Forget everything but compiled kernels."""
    serve.forget_runs()
    for memo in (serve._PLANS, plans.PLANS, append._MEMO, merging._MEMO):
        memo.clear()  # type: ignore[attr-defined]


def _compare(found: list[object], expected: list[object], call: str) -> None:
    """Say what differs, which is little of much."""
    if found != expected:
        pairs = ((one, other) for one, other in zip(found, expected, strict=False) if one != other)
        differing = next(pairs, (found, expected))
        raise AssertionError(f"{call}: {_flat(*differing)}")


def _flat(one: object, other: object) -> dict[str, object]:
    """Of two launches the numbers that differ."""
    if isinstance(one, tuple) and isinstance(other, tuple) and one[0] == other[0] and isinstance(one[1][0], dict):
        read, wanted = one[1][0], other[1][0]
        return {name: (read[name], wanted[name]) for name in read if read[name] != wanted[name]} or {"": (one, other)}
    return {"": (one, other)}


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@contextlib.contextmanager
def imagined_gpu(*, both_ways: bool = False) -> Iterator[Turns]:
    """The imagined GPU in the place of a real one: tensors of the CPU are on it."""
    fake = Turns(both_ways=both_ways)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "zeros", lambda index, count: torch.zeros(count, dtype=torch.int32))
        patch.setattr(counters, "_FREE", {})
        lengths = torch.full((1024,), 2**31 - 1, dtype=torch.int32)
        patch.setattr(decode_passes, "_LENGTHS", {0: lengths})
        patch.setattr(decode_plan, "_SHARED", {})
        patch.setattr(helpers, "_LAUNCHERS", {})
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        compile_nothing(patch, fake.make)
        with on_gpu_zero(fake, patch, lambda: fake.stream):
            forget()
            yield fake
            forget()
