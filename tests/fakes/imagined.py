"""Configs of imagined kernels, with any parameters of the launch vocabulary, launched both ways.

Nothing is compiled: what Triton would have made of a signature is made up, and the driver is the fake one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.codegen import families
from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter, Scratch, Sizes
from flashgen.codegen.render import KernelSource
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.launch.backward import FIELDS, BackwardTensors
from flashgen.launch.binding import Binding
from flashgen.launch.driver_launch import launcher
from flashgen.launch.driver_plan import DriverPlan
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout, block_of
from flashgen.launch.triton_plan import TritonBackward, TritonForward, TritonPlan
from tests.fakes.driver import FakeDriver, Launched
from tests.launch.kernels import tensors

SHAPE = (2, 6, 3, 200, 333)
ROWS = 256
"""Rows of `neg_delta`: those of the queries and a padding."""

ENTRIES = ("imagined_prepare", "imagined_main", "imagined_finish")
FIRST_FUNCTION = 0x7000
FIRST_PROGRAMS = 5

TILE = "tensordesc<bf16[1, 1, 64, 64]>"
LSE = ("LSE: *fp32", "lse_rows: i32")
POINTERS = ("Q: *bf16", "K: *bf16", "V: *bf16", "O: *bf16")
DESCRIPTORS = tuple(f"{name}_desc: {TILE}" for name in "qkvo")

BACKWARD_DESCRIPTORS = (
    (f"o_desc: {TILE}", f"do_desc: {TILE}", "LSE: *fp32", "NegDelta: *fp32", "DqAcc: *fp32", "seqlen_q: i32"),
    (
        *(f"{name}_desc: {TILE}" for name in ("q", "k", "v", "do", "dk", "dv")),
        "neg_delta_desc: tensordesc<fp32[1, 1, 64],NVMMASharedLayout(a=0, b=32)>",
        "dq_acc_desc: tensordesc<fp32[64, 64],NVMMASharedLayout(a=128, b=32)>",
        "softmax_scale_log2: fp32",
    ),
    (f"dq_desc: {TILE}", "DqAcc: *fp32", "softmax_scale: fp32"),
)
BACKWARD_POINTERS = (
    ("O: *bf16", "DO: *bf16", "LSE: *fp32", "DLSE: *fp32", "dlse_rows: i32", "NegDelta: *fp32"),
    (*(f"{name}: *bf16" for name in ("Q", "K", "V", "DO", "DK", "DV")), "LSE: *fp32", "NegDelta: *fp32"),
    (*(f"{name}: *bf16" for name in ("Q", "K", "V", "DO", "DQ")), "LSE: *fp32", "NegDelta: *fp32"),
)

PLAIN, SPLIT = Config.of("imagined", {}), Config.of("imagined_split", {})
"""A family whose backward kernels share scratch memory, and one whose forward kernels do."""


def scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    """Not in the order of memory, and of a size that needs rounding."""
    if spec.direction == "backward":
        return (
            Scratch(name="dq_acc", shape=(sizes.batch * sizes.nheads * ROWS + 1, 64)),
            Scratch(name="half_rows", shape=(sizes.batch, 7), dtype="bf16"),
            Scratch(name="neg_delta", shape=(sizes.batch, sizes.nheads, ROWS)),
        )
    if config.family == SPLIT.family:
        return (
            Scratch(name="partial_lse", shape=(3, sizes.batch, sizes.nheads, sizes.seqlen_q)),
            Scratch(name="partial_out", shape=(3 * sizes.batch * sizes.nheads * sizes.seqlen_q, 64)),
        )
    return ()


def imagined_family(name: str) -> Any:
    """The row of a family, imagined or real."""
    if name in (PLAIN.family, SPLIT.family):
        return SimpleNamespace(scratch=scratch, key_splits=lambda *_: 1)
    return families.family(name)


def parameters(*named: str) -> tuple[Parameter, ...]:
    """One kernel's, each as `"seqlen_q: i32"`."""
    pairs = (text.split(": ", 1) for text in named)
    return tuple(Parameter(name=name, type=kind) for name, kind in pairs)


def metadata_of(given: tuple[Parameter, ...]) -> SimpleNamespace:
    """Triton's metadata: boxes of 64 rows for the first descriptor, 65 for the second and so on, to tell them apart."""
    descriptors = [p for p in given if p.type.startswith("tensordesc")]
    boxes = [[*block_of(p)[:-2], 64 + number, 64][-len(block_of(p)) :] for number, p in enumerate(descriptors)]
    return SimpleNamespace(
        num_warps=12, shared=1000, tensordesc_meta=[{"block_size": box, "swizzle": 3} for box in boxes]
    )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One launch through Triton."""

    entry: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class Runner:
    """Stands for Triton's compiled kernel; keeps the grid and the arguments of each launch."""

    def __init__(self, entry: str, given: tuple[Parameter, ...], seen: list[Seen]) -> None:
        self.entry, self.given, self.seen = entry, given, seen
        self.metadata = metadata_of(given)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        names = [parameter.name for parameter in self.given]

        def run(*arguments: Any) -> None:
            known = dict(zip(names, arguments, strict=True))
            self.seen.append(Seen(entry=self.entry, grid=grid, arguments=known))

        return run


class Imagined:
    """The kernels of one config, each given by its parameters: 5 programs of the first, one more of each later one."""

    def __init__(self, *kernels: tuple[str, ...], key: str = "fwd-bf16-d64", config: Config = PLAIN) -> None:
        self.given = tuple(parameters(*named) for named in kernels)
        self.spec, self.config = Specialization.parse(key), config
        self.seen: list[Seen] = []
        parts = tuple(
            self._part(entry, each, FIRST_PROGRAMS + number)
            for number, (entry, each) in enumerate(zip(ENTRIES, self.given, strict=False))
        )
        source = KernelSource(entry="imagined", text="")
        self.compiled = CompiledKernel(source=source, device=find_device("h200"), parts=parts)

    def _part(self, entry: str, given: tuple[Parameter, ...], programs: int) -> CompiledPart:
        options = CompileOptions(num_warps=4, num_stages=1)
        kernel = KernelSpec(entry=entry, parameters=given, options=options, programs=lambda device, sizes: programs)
        handle = Runner(entry, given, self.seen)
        return CompiledPart(
            kernel=kernel, registers=32, spills=0, shared_bytes=1000, num_warps=12, compile_ms=0.0, handle=handle
        )

    def binding(self, geometry: Geometry) -> Binding:
        return Binding.of(self.compiled, self.spec, self.config, geometry)

    def through_the_driver(self, cuda: FakeDriver, geometry: Geometry, first: Geometry | None = None) -> Any:
        """A plan at a geometry, made for the `first` one."""
        functions = [FIRST_FUNCTION + number for number in range(len(self.given))]
        cuda.kernels |= dict(zip(functions, self.given, strict=True))
        layouts = [Layout(parameters=each, trailing=2) for each in self.given]
        plan = DriverPlan(self.binding(first or geometry), functions=functions, layouts=layouts, device_index=0)
        sized = plan.sized(geometry)
        assert sized is not None
        return launcher(plan)(sized)

    def through_triton(self, geometry: Geometry) -> Any:
        plan: TritonPlan
        kind = TritonForward if self.spec.direction == "forward" else TritonBackward
        plan = kind(self.binding(geometry), 0)
        return plan


class Both:
    """One config, launched both ways; what each kernel was given, equal but for where the scratch memory lies."""

    def __init__(self, kernel: Imagined, cuda: FakeDriver, geometry: Geometry, first: Geometry | None = None) -> None:
        self.kernel, self.cuda = kernel, cuda
        names = {name: piece.pointer for name, piece in kernel.binding(geometry).scratch.pieces.items()}
        self.pieces = {*names.values(), *(f"{name}_desc" for name in names)}
        self.plans = (kernel.through_the_driver(cuda, geometry, first), kernel.through_triton(geometry))

    def __call__(self, *arguments: Any) -> list[dict[str, Any]]:
        before = len(self.cuda.launches)
        self.kernel.seen.clear()
        results = [plan(*arguments) for plan in self.plans]
        read, seen = self.cuda.launches[before:], self.kernel.seen
        assert [one.entry for one in seen] == list(ENTRIES[: len(read)])
        assert [one.grid for one in seen] == [one.grid for one in read]
        found = self._relative([one.values for one in read], results[0])
        given = [{name: _address(value) for name, value in one.arguments.items()} for one in seen]
        for one, expected in zip(found, self._relative(given, results[1]), strict=True):
            assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        return found

    def _relative(self, kernels: list[dict[str, Any]], result: torch.Tensor | None) -> list[dict[str, Any]]:
        """Scratch pointers and descriptors, counted from what the call returned or else from the first of them."""
        if result is None:
            start = min((one[name] for one in kernels for name in one.keys() & self.pieces), default=0)
        else:
            start = result.data_ptr()
        return [
            {name: value - start if name in self.pieces else value for name, value in one.items()} for one in kernels
        ]


def _address(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        return value.base.data_ptr()
    return value or 0


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
    return {name: getattr(given, field).data_ptr() for name, field in FIELDS.items()}


def calls_of(cuda: FakeDriver, count: int) -> list[list[Launched]]:
    """The launches of each call of `count` kernels."""
    return [cuda.launches[i : i + count] for i in range(0, len(cuda.launches), count)]
