"""Every address that an interpreted kernel reads or writes lies in a tensor it was given, and no integer overflows.

On a GPU a read past the end of a tensor mostly goes unseen, and sometimes is an illegal access: it depends on what lies
behind. Here numpy's addresses are the tensors' own, so each access is compared with the bounds of the arguments.

Triton's interpreter spends most of its time on things that change no result, which are replaced here: it patches
its language again for every call of a device function, it computes whether integers overflow, to drop the answer, and
it makes its types, and its table of those of numpy, again for every operation (`types_once`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter.types_once import make_types_once


class Bounds:
    """First and last byte, exclusive, of every tensor that the kernel under way was given."""

    def __init__(self) -> None:
        self.spans: dict[int, int] = {}
        self.edges: tuple[np.ndarray, np.ndarray] | None = None

    def clear(self) -> None:
        self.spans.clear()
        self.edges = None

    def add(self, tensor: Any) -> None:
        self.edges = None
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = tensor.data_ptr() + (last + 1) * tensor.element_size()
            self.spans[tensor.data_ptr()] = max(end, self.spans.get(tensor.data_ptr(), 0))

    def check(self, addresses: np.ndarray, mask: np.ndarray, nbytes: int, what: str) -> None:
        # a mask that was one scalar is of integers in the interpreter, which would be indices here
        used = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
        if used.size == 0:
            return
        if self.edges is None:
            starts = np.array(sorted(self.spans), dtype=np.uint64)
            ends = np.array([self.spans[int(start)] for start in starts], dtype=np.uint64)
            # a tensor may lie inside another one: as far as any that begins at or before reaches
            self.edges = starts, np.maximum.accumulate(ends)
        starts, reach = self.edges
        place = np.searchsorted(starts, used, side="right").astype(np.int64) - 1
        outside = (place < 0) | (used + np.uint64(nbytes) > reach[np.maximum(place, 0)])
        if outside.any():
            first = int(used[outside][0])
            behind = int(reach[max(0, int(place[outside][0]))])
            raise AssertionError(
                f"{what} of {int(outside.sum())} of {used.size} addresses outside every argument; "
                f"the first {first - behind} bytes behind the end of the one before it"
            )


def before_each_launch(monkeypatch: pytest.MonkeyPatch, forget: Callable[[], object]) -> None:
    """Call `forget` before every launch of a kernel."""
    executor = interpreter.GridExecutor.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        forget()
        return executor(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)


known_dtype = functools.cache(interpreter._get_np_dtype)


@pytest.fixture(autouse=True)
def types_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make_types_once(monkeypatch)


@pytest.fixture(autouse=True)
def one_table_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def dtype_of(kind: Any) -> np.dtype:
        scalar = kind.scalar  # types of blocks have no hash
        return np.dtype(np.uint64) if scalar.is_ptr() else known_dtype(scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype_of)


@pytest.fixture(autouse=True)
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch, or a call in it, has patched stays so until the launch ends: once for each module is enough."""
    patch_lang = interpreter._patch_lang
    done: set[frozenset[str]] = set()

    def patched(fn: Any) -> Any:
        modules = frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules in done:
            return interpreter._LangPatchScope()
        done.add(modules)
        return patch_lang(fn)

    before_each_launch(monkeypatch, done.clear)
    monkeypatch.setattr(interpreter, "_patch_lang", patched)


WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@pytest.fixture(autouse=True)
def asserting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.device_assert` counts, and sums, differences and products of 32 bits are those of 64 bits."""

    def in_range(lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            exact = WIDE[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"{operation.__name__} of {kind} overflows"

    monkeypatch.setattr(interpreter.interpreter_semantic, "binary_op_sanitize_overflow_impl", in_range)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))


@pytest.fixture(autouse=True)
def in_bounds(monkeypatch: pytest.MonkeyPatch) -> Bounds:
    bounds = Bounds()
    convert = interpreter._implicit_cvt
    builder = interpreter.InterpreterBuilder
    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def implicit(arg: Any) -> Any:
        if hasattr(arg, "data_ptr"):
            bounds.add(arg)
        return convert(arg)

    def element(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        bounds.check(ptrs.data, mask.data, element(ptrs), "a read")
        return load(self, ptrs, mask, *rest, **named)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(ptrs.data, mask.data, element(ptrs), "a write")
        return store(self, ptrs, value, mask, *rest)

    def checked_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(ptr.data, mask.data, element(ptr), "an atomic")
        return rmw(self, op, ptr, value, mask, *rest)

    before_each_launch(monkeypatch, bounds.clear)
    monkeypatch.setattr(interpreter, "_implicit_cvt", implicit)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", checked_rmw)
    return bounds
