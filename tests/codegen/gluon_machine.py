"""A rendered Gluon kernel on the CPU: every role of every CTA a thread, barriers and TMA as the PTX manual says.

Registers are torch's tensors, whatever their layouts; products are computed when they are issued. What it shows is that
roles agree and wait for what is there, where TMA loads and stores, what scores are hidden, and the results. Named
barriers count threads, of which a role has 32 for each of its warps. It knows nothing of time, and of PTX but that of
barriers, of a reciprocal and a logarithm. Kernels in plain Triton run one program after the other.
"""

from __future__ import annotations

import ast
import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

WAIT_S = 60.0
"""No barrier is waited for so long but in a deadlock."""


@dataclass(kw_only=True)
class Barrier:
    """One mbarrier: arrivals and bytes that its phase waits for."""

    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, arrivals: int, transferred: int) -> None:
        with self.changed:
            self.pending, self.bytes = self.pending - arrivals, self.bytes + transferred
            assert self.pending >= 0
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any, pred: Any = True) -> None:
        with self.changed:
            if pred and not self.changed.wait_for(lambda: self.phase & 1 != int(parity), WAIT_S):
                raise AssertionError(f"phase {self.phase} never ended")


@dataclass(kw_only=True)
class NamedBarrier:
    """One barrier of a CTA that counts threads."""

    arrived: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def arrive(self, threads: int, expected: int, *, waits: bool) -> None:
        with self.changed:
            self.arrived, phase = self.arrived + threads, self.phase
            assert self.arrived <= expected
            if self.arrived == expected:
                self.phase, self.arrived = phase + 1, 0
                self.changed.notify_all()
            elif waits and not self.changed.wait_for(lambda: self.phase != phase, WAIT_S):
                raise AssertionError(f"{self.arrived} of {expected} threads came")


class Shared:
    """A tile in shared memory, undefined at first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.tensor.view(*shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def slice(self, start: int, size: int, axis: int = 0) -> Shared:
        return Shared(self.tensor.narrow(axis, start, size))

    def load(self, layout: object) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(torch.as_tensor(value).broadcast_to(self.tensor.shape))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        """The same bytes as another tile, or the first of them."""
        size = torch.Size(shape).numel()
        return Shared(self.tensor.contiguous().view(-1).view(dtype)[:size].view(*shape))


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What TMA is told of a tensor, in elements; `memory` is all of its storage."""

    memory: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: None = None

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=self.memory.element_size() * torch.Size(self.block).numel(), shape=self.block)

    def parts(self, place: Sequence[Any]) -> list[tuple[slice, slice, torch.Tensor]]:
        """What there is of the box at `place`: rows and columns of it, and the memory of these.

        Addresses have 64 bits. Rows in memory of which no address is above them are one part, others one each; what is
        clipped is in none. Of a box of several heads the rows of each come one after the other.
        """
        *outer, row, column = (int(x) for x in place)
        assert len(place) == len(self.shape)
        found = []
        for number in range(self.heads):
            before = number * self.block[-2]
            heads = [*outer[:-1], outer[-1] + number] if outer else []
            for rows, columns, memory in self._parts_of_head([*heads, row, column]):
                found.append((slice(before + rows.start, before + rows.stop), columns, memory))
        return found

    def box(self, tile: Shared) -> torch.Tensor:
        """The rows and columns of a tile that is as large as a box."""
        found = tile.tensor.view(-1, self.block[-1])
        assert len(found) == self.heads * self.block[-2]
        return found

    def store(self, place: Sequence[Any], tile: Shared) -> None:
        """What there is of the box at `place` gets the values of a tile."""
        box = self.box(tile)
        for rows, columns, memory in self.parts(place):
            memory.copy_(box[rows, columns])

    @property
    def heads(self) -> int:
        """Of a box; its other axes have size 1 but for rows and columns."""
        return self.block[-3] if len(self.block) > 2 else 1

    def _parts_of_head(self, at: list[int]) -> list[tuple[slice, slice, torch.Tensor]]:
        size = self.memory.element_size()
        first, last = max(-at[-2], 0), min(self.shape[-2] - at[-2], self.block[-2])
        columns = slice(max(-at[-1], 0), max(min(self.shape[-1] - at[-1], self.block[-1]), 0))
        outside = any(not 0 <= x < most for x, most in zip(at[:-2], self.shape, strict=False))
        if outside or first >= last or columns.start >= columns.stop:
            return []
        here = [*at[:-2], at[-2] + first, at[-1] + columns.start]
        steps, step = sum(x * y for x, y in zip(here, self.strides, strict=True)), self.strides[-2]
        count, width, most = last - first, columns.stop - columns.start, self.memory.numel()
        if step >= width and steps >= 0 and steps + (count - 1) * step + width <= most:
            start = self.memory.storage_offset() + steps
            return [(slice(first, last), columns, self.memory.as_strided((count, width), (step, 1), start))]
        starts = [size * (steps + row * step) % (1 << 64) // size for row in range(count)]
        assert max(starts) + width <= most
        return [
            (slice(row, row + 1), columns, self.memory[None, start : start + width])
            for row, start in enumerate(starts, first)
        ]


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """An address in an array, of which nothing outside is ever touched."""

    memory: torch.Tensor
    place: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(memory=self.memory, place=self.place + steps)

    def __sub__(self, steps: Any) -> Pointer:
        return self + -steps

    def __getitem__(self, axes: Any) -> Pointer:
        return Pointer(memory=self.memory, place=self.place[axes])

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where it points to, and which of that is touched; None is all."""
        place = torch.as_tensor(self.place)
        inside = (place >= 0) & (place < len(self.memory))
        if mask is None:
            assert bool(inside.all())
            return place, None
        kept = torch.as_tensor(mask).broadcast_to(place.shape)
        assert bool((inside | ~kept).all())
        return place, kept


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, as what `Descriptor` and `Pointer` have."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: object) -> torch.Tensor:
    place, kept = pointer.places(mask)
    if kept is None:
        return pointer.memory[place].clone()  # by a single number it would be a view
    value = pointer.memory[torch.where(kept, place, 0)] if len(pointer.memory) else torch.zeros(place.shape)
    return torch.where(kept, value, torch.as_tensor(other, dtype=pointer.memory.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place, kept = pointer.places(mask)
    stored = torch.as_tensor(value, dtype=pointer.memory.dtype).broadcast_to(place.shape)
    if kept is None:
        pointer.memory[place] = stored
    else:
        pointer.memory[place[kept]] = stored[kept]


def _copy_in(descriptor: Descriptor, place: Sequence[Any], barrier: Barrier, tile: Shared) -> None:
    box = descriptor.box(tile)
    box.zero_()
    for rows, columns, memory in descriptor.parts(place):
        box[rows, columns] = memory
    barrier.take(0, -descriptor.block_type.nbytes)


_ADDING = threading.Lock()


def _add_out(descriptor: Descriptor, place: Sequence[Any], tile: Shared) -> None:
    box, added = tile.tensor.view(-1, descriptor.block[-1]), 0
    with _ADDING:
        for rows, columns, memory in descriptor.parts(place):
            memory.add_(box[rows, columns])
            added += len(memory)
    assert added == len(box) == descriptor.block[-2], "no row is clipped"


def _mma(a: Any, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    first = a.tensor if isinstance(a, Shared) else a
    product = first.float() @ b.tensor.float()
    return acc + product if use_acc else product


def _tensors(*values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.as_tensor, values))


def key_places(first_key: Any, end_key: Any, whole: Any, block_n: int) -> torch.Tensor:
    """The keys of a block, for functions of the caller: in the place of `_k_idx`, which asks for layouts."""
    keys = first_key + torch.arange(block_n)
    return (keys if whole else keys.clamp(max=int(end_key)))[None, :]


Role = tuple[int, int, dict[int, NamedBarrier]]
"""The CTA of a thread, how many threads it stands for, and the named barriers of the CTA."""


class Machine:
    """The grid of one launch."""

    def __init__(self, programs: int, room: int | None = None, grid: tuple[int, int, int] | None = None) -> None:
        self._local, self._lock, self._programs = threading.local(), threading.Lock(), programs
        self._grid = grid or (programs, 1, 1)
        self._room = threading.Semaphore(room or programs)
        self._failures: list[BaseException] = []

    def run(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Run as many CTAs at the same time as there is room for, and raise what the first of them raised."""

        def in_turn(*arguments: Any) -> None:
            with self._room:
                kernel(*arguments)

        self._together([(in_turn, arguments, (program, 128, {})) for program in range(self._programs)])

    def run_each(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Run all programs of a kernel without barriers, one after the other."""
        for program in range(self._programs):
            self._local.program = program
            kernel(*arguments)

    def _together(self, calls: Sequence[tuple[Callable[..., None], Sequence[Any], Role]]) -> None:
        def one(function: Callable[..., None], arguments: Sequence[Any], role: Role) -> None:
            self._local.program, self._local.threads, self._local.named = role
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                self._failures.append(error)

        threads = [threading.Thread(target=one, args=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _specialize(self, roles: Sequence[tuple[Any, Any]], warps: Sequence[int], *_: object) -> None:
        named: dict[int, NamedBarrier] = collections.defaultdict(NamedBarrier)
        self._together(
            [
                (function, arguments, (self._local.program, 32 * count, named))
                for (function, arguments), count in zip(roles, [4, *warps], strict=True)
            ]
        )

    def _inline(self, asm: str, constraints: str, arguments: list[Any], **_: object) -> Any:
        if asm.startswith("bar."):
            number, expected = int(arguments[0]), int(asm.split(";", maxsplit=1)[0].split(",")[1])
            with self._lock:
                barrier = self._local.named[number]
            barrier.arrive(self._local.threads, expected, waits=asm.startswith("bar.sync"))
            return arguments[0]
        return _computed(asm, arguments)

    def _program_id(self, axis: int) -> torch.Tensor:
        x, y, _ = self._grid
        number = self._local.program
        return torch.tensor((number % x, number // x % y, number // (x * y))[axis])

    def _copies_landed(self, barrier: Barrier, increment_count: bool) -> None:
        """All threads of a role arrive, whose copies are done when they are asked for."""
        assert not increment_count
        barrier.take(self._local.threads, 0)

    def _atomic_add(self, pointer: Pointer, value: int, **_: object) -> torch.Tensor:
        with self._lock:
            before = _load(pointer)
            _store(pointer, before + value)
            return before

    def names(self) -> dict[str, Any]:
        """What a rendered kernel imports."""
        gl = SimpleNamespace(
            constexpr=lambda value: value,
            int32=torch.int64,
            int64=torch.int64,
            int1=torch.bool,
            static_assert=_assert,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
            float16=torch.float16,
            program_id=self._program_id,
            num_programs=lambda axis: self._programs,
            warp_specialize=self._specialize,
            atomic_add=self._atomic_add,
            allocate_shared_memory=_allocate,
            load=_load,
            store=_store,
            arange=lambda start, end, layout=None: torch.arange(start, end),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            where=lambda condition, a, b: torch.where(*_tensors(condition, a, b)),
            minimum=lambda a, b: torch.minimum(*_tensors(a, b)),
            maximum=lambda a, b: torch.maximum(*_tensors(a, b)),
            max=lambda x, axis: x.amax(axis),
            min=lambda x, axis: x.amin(axis),
            num_warps=lambda: 1,
            sum=lambda x, axis=None: x.sum(axis),
            cdiv=lambda a, b: torch.as_tensor(a + b - 1).div(b, rounding_mode="trunc"),
            exp2=torch.exp2,
            log2=torch.log2,
            cumsum=torch.cumsum,
            expand_dims=torch.unsqueeze,
            permute=torch.permute,
            abs=torch.abs,
            broadcast=torch.broadcast_tensors,
            static_range=range,
            associative_scan=lambda x, axis, combine: x.cumsum(axis),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            inline_asm_elementwise=self._inline,
            to_tensor=torch.as_tensor,
            shared_memory_descriptor=Shared,
            NVMMASharedLayout=_NoLayout,
            **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout"), lambda *_: None),
            **dict.fromkeys(("SliceLayout", "SwizzledSharedLayout", "DistributedLinearLayout"), lambda *_: None),
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: Barriers,
            init=_init,
            expect=lambda barrier, size: barrier.take(1, size),
            arrive=lambda barrier, count: barrier.take(count, 0),
            wait=Barrier.wait,
        )
        nothing = SimpleNamespace(barrier=lambda: None)
        jit = SimpleNamespace(jit=lambda f=None, **_: f if f is not None else (lambda g: g))
        tma = {"async_load": _copy_in, "async_store": Descriptor.store, "async_atomic_add": _add_out}
        return {
            "gl": SimpleNamespace(**vars(gl), **vars(nothing)),
            "tl": SimpleNamespace(**vars(gl), range=range, extra=_EXTRA),
            "gluon": jit,
            "triton": jit,
            "mbarrier": mbarrier,
            "async_copy": SimpleNamespace(async_load=_copy_rows, mbarrier_arrive=self._copies_landed),
            "tma": SimpleNamespace(**tma, store_wait=lambda pending: None),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": _mma,
            "warpgroup_mma_wait": lambda count, values: values[0] if len(values) == 1 else values,
        }


class _NoLayout:
    def __init__(self, *_: object) -> None:
        pass

    get_default_for = staticmethod(lambda *_: None)


def _copy_rows(tile: Shared, pointers: Pointer) -> None:
    tile.store(_load(pointers))


_EXTRA = SimpleNamespace(cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None))
"""Kernels run one after the other."""


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Any:
    if layout is Barriers:
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) > 1 else Barrier()
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else -99, dtype=dtype))


def _assert(condition: bool, message: str) -> None:
    assert condition, message


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _computed(asm: str, arguments: list[Any]) -> Any:
    if asm.startswith("rcp"):
        return 1.0 / arguments[0]
    if asm.startswith("lg2"):
        return torch.log2(arguments[0])
    assert "wait_group" in asm or asm.startswith(("mov.", "fence."))
    return arguments[0]


class _Rebinds(ast.NodeTransformer):
    """`x += 1` gives the name another value, and leaves those alone that others know by another name."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        read = ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Load()), node)
        value = ast.copy_location(ast.BinOp(left=read, op=node.op, right=node.value), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=value), node)


def kernel_of(text: str, entry: str, machine: Machine, **instead: Callable[..., Any]) -> Callable[..., None]:
    """The kernel of a rendered text, with some of its functions replaced."""
    tree = _Rebinds().visit(ast.parse(text))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    space: dict[str, Any] = machine.names()
    exec(compile(tree, "<rendered>", "exec"), space)
    space |= instead
    found: Callable[..., None] = space[entry]
    return found
