"""Backward configs of imagined kernels with any parameters of the launch vocabulary, launched both ways."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.codegen.family import Parameter, Scratch, Sizes
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import backward_scratch
from flashgen.launch.backward_binding import BackwardBinding
from flashgen.launch.backward_driver_plan import DriverBackwardPlan
from flashgen.launch.backward_geometry import BackwardGeometry, BackwardTensors
from flashgen.launch.backward_plan import BackwardLaunch, TritonBackwardPlan
from flashgen.launch.parameters import Layout
from tests.launch.fake_driver import FakeDriver, Launched
from tests.launch.kernels import tensors
from tests.launch.rows import CONFIG, compiled_of, metadata_of, part_of

SHAPE = (2, 6, 3, 200, 333)
ROWS = 256
TILE = "tensordesc<bf16[1, 1, 64, 64]>"
ENTRIES = ("imagined_prepare", "imagined_main", "imagined_finish")
FIRST_FUNCTION = 0x7000
NAMES = {"q": "q", "k": "k", "v": "v", "o": "out", "do": "dout", "dq": "dq", "dk": "dk", "dv": "dv"}

DESCRIPTORS = (
    (f"o_desc: {TILE}", f"do_desc: {TILE}", "LSE: *fp32", "NegDelta: *fp32", "DqAcc: *fp32", "seqlen_q: i32"),
    (
        *(f"{name}_desc: {TILE}" for name in ("q", "k", "v", "do", "dk", "dv")),
        "neg_delta_desc: tensordesc<fp32[1, 1, 64],NVMMASharedLayout(a=0, b=32)>",
        "dq_acc_desc: tensordesc<fp32[64, 64],NVMMASharedLayout(a=128, b=32)>",
        "softmax_scale_log2: fp32",
    ),
    (f"dq_desc: {TILE}", "DqAcc: *fp32", "softmax_scale: fp32"),
)
POINTERS = (
    ("O: *bf16", "DO: *bf16", "LSE: *fp32", "DLSE: *fp32", "dlse_rows: i32", "NegDelta: *fp32"),
    (*(f"{name}: *bf16" for name in ("Q", "K", "V", "DO", "DK", "DV")), "LSE: *fp32", "NegDelta: *fp32"),
    (*(f"{name}: *bf16" for name in ("Q", "K", "V", "DO", "DQ")), "LSE: *fp32", "NegDelta: *fp32"),
)


def scratch(sizes: Sizes) -> tuple[Scratch, ...]:
    """Not in the order of memory, and of a size that needs rounding."""
    return (
        Scratch(name="dq_acc", shape=(sizes.batch * sizes.nheads * ROWS + 1, 64)),
        Scratch(name="half_rows", shape=(sizes.batch, 7), dtype="bf16"),
        Scratch(name="neg_delta", shape=(sizes.batch, sizes.nheads, ROWS)),
    )


def kernels(*named: tuple[str, ...]) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of several kernels, each as `"seqlen_q: i32"`."""
    pairs = ([text.split(": ", 1) for text in each] for each in named)
    return tuple(tuple(Parameter(name=name, type=kind) for name, kind in each) for each in pairs)


def backward_tensors(
    key: str = "bwd-bf16-d64", shape: tuple[int, int, int, int, int] = SHAPE, *, dlse: bool = False, bshd: bool = False
) -> BackwardTensors:
    spec = Specialization.parse(key)
    q, k, v, out = tensors(spec, shape, bshd=bshd)
    dq, dk, dv, dout = tensors(spec, shape)
    lse = torch.empty(q.shape[:3])
    return BackwardTensors(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        dout=dout,
        dq=dq,
        dk=dk,
        dv=dv,
        dlse=torch.empty_like(lse) if dlse else None,
    )


def pointers(given: BackwardTensors) -> dict[str, int]:
    """Addresses by id."""
    return {name: getattr(given, field).data_ptr() for name, field in NAMES.items()}


class Runner:
    """Stands for Triton's compiled kernel; keeps the grid and the arguments of each launch."""

    def __init__(self, entry: str, given: tuple[Parameter, ...], seen: list[tuple[str, Any, dict[str, Any]]]) -> None:
        self.entry, self.given, self.seen = entry, given, seen
        self.metadata = metadata_of(given)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        names = [parameter.name for parameter in self.given]
        return lambda *arguments: self.seen.append((self.entry, grid, dict(zip(names, arguments, strict=True))))


class ImaginedBackward:
    """Kernels of one backward config; `number` programs of the first, one more of each later one."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        given: tuple[tuple[Parameter, ...], ...],
        key: str = "bwd-bf16-d64",
        *,
        number: int = 5,
        pieces: Callable[[Sizes], tuple[Scratch, ...]] = scratch,
    ) -> None:
        row = SimpleNamespace(scratch=lambda spec, config, sizes: pieces(sizes))
        monkeypatch.setattr(backward_scratch, "family", lambda name: row)
        self.given, self.spec = given, Specialization.parse(key)
        self.seen: list[tuple[str, Any, dict[str, Any]]] = []
        parts = (
            part_of(entry, each, Runner(entry, each, self.seen), programs=number + i)
            for i, (entry, each) in enumerate(zip(ENTRIES, given, strict=False))
        )
        self.compiled = compiled_of(*parts)

    def binding(self, geometry: BackwardGeometry) -> BackwardBinding:
        return BackwardBinding.of(self.compiled, self.spec, CONFIG, geometry)

    def through_the_driver(self, cuda: FakeDriver, geometry: BackwardGeometry) -> BackwardLaunch:
        functions = [FIRST_FUNCTION + i for i in range(len(self.given))]
        cuda.kernels = dict(zip(functions, self.given, strict=True))
        layouts = [Layout.of(each, trailing=2) for each in self.given]
        binding = self.binding(geometry)
        return DriverBackwardPlan(binding, functions=functions, layouts=layouts, device_index=0).launch

    def through_triton(self, geometry: BackwardGeometry) -> BackwardLaunch:
        return TritonBackwardPlan(self.binding(geometry), 0)


class BothBackward:
    """One config, launched both ways; what each kernel was given, equal but for where the scratch memory lies."""

    def __init__(self, kernel: ImaginedBackward, cuda: FakeDriver, geometry: BackwardGeometry) -> None:
        self.kernel, self.cuda = kernel, cuda
        self.pieces = {piece.pointer for piece in kernel.binding(geometry).scratch.pieces.values()}
        self.plans = (kernel.through_the_driver(cuda, geometry), kernel.through_triton(geometry))

    def __call__(
        self,
        given: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> list[dict[str, Any]]:
        before = len(self.cuda.launches)
        self.kernel.seen.clear()
        results = [plan(given, softmax_scale, q_offset, features) for plan in self.plans]
        read = self.cuda.launches[before:]
        assert [name for name, _, _ in self.kernel.seen] == list(ENTRIES[: len(read)])
        assert [grid for _, grid, _ in self.kernel.seen] == [one.grid for one in read]
        starts = [result.data_ptr() for result in results]
        found = [_relative(one.values, self.pieces, starts[0]) for one in read]
        for one, (_, _, arguments) in zip(found, self.kernel.seen, strict=True):
            expected = _relative({name: _address(value) for name, value in arguments.items()}, self.pieces, starts[1])
            assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        return found


def _address(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        return value.base.data_ptr()
    return value or 0


def _relative(values: dict[str, Any], pieces: set[str], start: int) -> dict[str, Any]:
    """Scratch pointers and descriptors, counted from the start of the call's scratch memory."""
    ours = {name for name in values if name in pieces or name in ("neg_delta_desc", "dq_acc_desc")}
    return {name: value - start if name in ours else value for name, value in values.items()}


def replaced(given: BackwardTensors, **changes: torch.Tensor | None) -> BackwardTensors:
    return given._replace(**changes)


def calls_of(cuda: FakeDriver, count: int) -> list[list[Launched]]:
    """The launches of each call of `count` kernels."""
    return [cuda.launches[i : i + count] for i in range(0, len(cuda.launches), count)]
