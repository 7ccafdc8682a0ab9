"""The calls whose memory traffic `benchmarks.io` counts: which ones, and each made ready to run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

import flashgen
from benchmarks.impls import IMPLS, Call, Impl
from benchmarks.problems import training_inputs
from benchmarks.suites import HIDDEN, TOKENS
from benchmarks.training_impls import BACKWARD
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import validate
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError
from flashgen.core.workload import Workload
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import make_plan
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.inputs import Inputs, make_inputs

FORWARD_SUITE, BACKWARD_SUITE, BLOCKS_SUITE = "io_forward", "io_backward", "io_blocks"
SUITES = (FORWARD_SUITE, BACKWARD_SUITE, BLOCKS_SUITE)
SEQLENS = (1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
IMPL_NAMES = ("flashgen", "sdpa-flash", "standard")

BLOCK_WORKLOADS = (
    Workload(batch=4, nheads=16, seqlen_q=4096, head_dim=128),
    Workload(batch=1, nheads=1, seqlen_q=262144, head_dim=128),
)
"""K and V of a head have 2 MiB, which any L2 holds, and 128 MiB, which none does."""

BLOCKS = {
    (16, 32): 4,
    (32, 32): 4,
    (64, 32): 4,
    (128, 32): 8,
    (256, 32): 8,
    (128, 16): 8,
    (128, 64): 8,
    (128, 128): 8,
}
"""Warps of a program by (block_m, block_n): none spills registers for heads of 128, which would be traffic as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call to count. `impl` is an implementation's name, or in the suite of block sizes `<block_m>x<block_n>`."""

    suite: str
    workload: Workload
    impl: str

    @property
    def subject(self) -> tuple[str, str, str]:
        """As `Row.subject`."""
        return self.suite, self.workload.key, self.impl

    def __str__(self) -> str:
        return " ".join(self.subject)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str` wrote."""
        suite, key, impl = text.split()
        return cls(suite=suite, workload=Workload.parse(key), impl=impl)


def cases(suites: Iterable[str] = SUITES) -> tuple[Case, ...]:
    """Every call of these suites: 16k tokens of hidden size 2048 over the lengths, and the block sizes; no mask."""
    return tuple(case for suite in suites for case in _CASES[suite]())


def _over_lengths(suite: str, direction: str) -> Iterator[Case]:
    for d in HEAD_DIMS:
        for s in SEQLENS:
            workload = Workload(direction=direction, batch=TOKENS // s, nheads=HIDDEN // d, seqlen_q=s, head_dim=d)
            for impl in IMPL_NAMES:
                yield Case(suite=suite, workload=workload, impl=impl)


def _over_blocks() -> Iterator[Case]:
    for workload in BLOCK_WORKLOADS:
        for block_m, block_n in BLOCKS:
            yield Case(suite=BLOCKS_SUITE, workload=workload, impl=f"{block_m}x{block_n}")


_CASES = {
    FORWARD_SUITE: lambda: _over_lengths(FORWARD_SUITE, "forward"),
    BACKWARD_SUITE: lambda: _over_lengths(BACKWARD_SUITE, "backward"),
    BLOCKS_SUITE: _over_blocks,
}


def impl_of(case: Case) -> Impl:
    """The implementation that a case over lengths calls."""
    among = BACKWARD if case.suite == BACKWARD_SUITE else IMPLS
    return next(impl for impl in among if impl.name == case.impl)


def version_of(case: Case) -> str:
    """The version of what a case calls."""
    return flashgen.__version__ if case.suite == BLOCKS_SUITE else impl_of(case).version()


def blocks_of(impl: str) -> tuple[int, int]:
    """(block_m, block_n) of a case over block sizes."""
    block_m, block_n = impl.split("x")
    return int(block_m), int(block_n)


def block_config(block_m: int, block_n: int) -> Config:
    """The portable forward kernel with these blocks: pointers, two stages, query blocks of a head side by side."""
    knobs = {"block_m": block_m, "block_n": block_n, "num_warps": BLOCKS[block_m, block_n], "num_stages": 2}
    rest = {"loads": "pointer", "maxnreg": 0, "heads_per_group": 1, "heavy_first": False, "split_d": False}
    return validate(Config.of("portable_forward", {**knobs, **rest}))


def prepare(case: Case, device: Device, where: torch.device) -> Call:
    """The call of a case on one set of inputs.

    Raises:
        FlashgenError: flashgen cannot make it.
        RuntimeError: the implementation refuses it, or the memory does not suffice.
    """
    workload = case.workload
    if case.suite == BACKWARD_SUITE:
        inputs: Inputs = training_inputs(workload, copies=1, where=where)
    else:
        inputs = make_inputs(workload, copies=1, seed=INPUT_SEED, device=where)
    if case.suite == BLOCKS_SUITE:
        return _block_call(case, inputs, device)
    impl = impl_of(case)
    reason = impl.unsupported(workload)
    if reason is not None:
        raise RuntimeError(reason)
    return impl.prepare(workload, inputs)


def _block_call(case: Case, inputs: Inputs, device: Device) -> Call:
    spec, config = case.workload.specialization, block_config(*blocks_of(case.impl))
    compiled = compile_kernel(spec, config, device)
    if compiled.spills:
        raise BuildError(f"{config} spills {compiled.spills} bytes of a thread, which would be counted as traffic")
    q, k, v, out = inputs.q[0], inputs.k[0], inputs.v[0], inputs.out[0]
    launch = make_plan(compiled, spec, config, Geometry.of(q, k, v, out), 0)

    def run(n: int) -> torch.Tensor:
        launch(q, k, v, out)
        return out

    return Call(run=run)
