"""The compile pool: results, each once, and processes that hang or abort cost one candidate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.compiled import Compiled, Taken
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.tuning.compile_pool import CompilePool, rejected
from tests.processes import alive, eventually
from tests.tiers import EXHAUSTIVE

H100 = find_device("h100")
SPEC = Workload(batch=1, nheads=1, seqlen_q=128, head_dim=64).specialization


def candidate(kind: int, path: str = "pointer") -> Config:
    return Config.of("f", {"num_stages": kind, "loads": path})


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    service = "tests.tuning.fake_compilers:Misbehaving"
    with CompilePool(H100, jobs=2, timeout_s=2.0, service=service) as made:
        yield made


def test_hangs_aborts_and_errors_cost_one_candidate_each(pool: CompilePool, tmp_path: Path) -> None:
    child = tmp_path / "pid"
    order = (candidate(2, str(child)), candidate(3), candidate(4), candidate(1))
    for config in order:
        pool.submit(SPEC, config)
    hang, abort, error, good = (pool.result(SPEC, config) for config in order)
    assert isinstance(hang, Failure)
    assert hang.stage == "timeout"
    assert isinstance(abort, Failure)
    assert abort.stage == "build"
    assert "SIGABRT" in abort.reason
    assert isinstance(error, Failure)
    assert "planted" in error.reason
    assert isinstance(good, Compiled)
    assert eventually(lambda: not alive(int(child.read_text())), 5), "what a killed process started must die with it"


def test_a_candidate_is_compiled_once(pool: CompilePool, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    config = candidate(5, str(calls))
    results = [pool.result(SPEC, config) for _ in range(3)]
    other = Specialization.of(Workload(batch=9, nheads=4, seqlen_q=7, head_dim=64))  # another shape of the same class
    assert pool.result(other, config) == results[0] == results[2]
    assert calls.read_text() == "x"


def test_closing_kills_what_is_still_compiling(tmp_path: Path) -> None:
    child = tmp_path / "pid"
    service = "tests.tuning.fake_compilers:Misbehaving"
    pool = CompilePool(H100, jobs=1, timeout_s=600, service=service)
    pool.submit(SPEC, candidate(2, str(child)))
    while not (child.exists() and child.read_text()):
        time.sleep(0.02)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert not alive(int(child.read_text()))


@EXHAUSTIVE
def test_real_candidates_compile_without_a_gpu() -> None:
    config = default_config(SPEC, H100)
    with CompilePool(H100, jobs=1) as pool:
        compiled = pool.result(SPEC, config)
    assert isinstance(compiled, Compiled), compiled
    assert compiled.registers > 0
    assert compiled.occupancy >= 1
    assert compiled.source_digest
    assert rejected(compiled, spill_limit_bytes=64) is None


def test_spilling_and_oversized_candidates_are_rejected() -> None:
    def compiled(spills: int, occupancy: int) -> Compiled:
        return Compiled(registers=255, spills=spills, shared_bytes=1, occupancy=occupancy)

    spilling, oversized = (rejected(c, spill_limit_bytes=64) for c in (compiled(65, 1), compiled(0, 0)))
    assert spilling is not None
    assert oversized is not None
    assert (spilling.stage, oversized.stage) == ("resources", "resources")
    assert rejected(compiled(64, 1), spill_limit_bytes=64) is None
    failure = Failure(stage="build", reason="x")
    assert rejected(failure, spill_limit_bytes=0) is failure


def test_of_several_kernels_the_worst_counts() -> None:
    light = Taken(registers=64, spills=0, shared_bytes=1024, occupancy=8)
    heavy = Taken(registers=255, spills=80, shared_bytes=65536, occupancy=1)
    both = Compiled.of({"f_prepare": light, "f_main": heavy}, compile_ms=7.0)
    assert (both.registers, both.spills, both.shared_bytes, both.occupancy) == (255, 80, 65536, 1)
    assert (both.part("f_prepare"), both.part("f_main")) == (light, heavy)
    assert both.part("f_unknown") is both
    spilling = rejected(both, spill_limit_bytes=64)
    assert spilling is not None
    assert "spills 80 bytes" in spilling.reason
    too_many = Taken(registers=255, spills=0, shared_bytes=0, occupancy=0)
    refused = rejected(Compiled.of({"f_main": light, "f_dq": too_many}), spill_limit_bytes=64)
    assert refused is not None
    assert refused.reason == "f_dq does not fit: 255 registers, 0 bytes of shared memory"


def test_a_pool_needs_a_process() -> None:
    with pytest.raises(TuningError, match="at least 1"):
        CompilePool(H100, jobs=0)
