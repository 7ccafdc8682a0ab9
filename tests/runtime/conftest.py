"""Databases of the test's own in both places, and a process that has served nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from flashgen.codegen import build
from flashgen.db import layers
from flashgen.launch import binaries, decode_plan, nvml, plan
from flashgen.runtime.decode import plans, runs
from flashgen.runtime.ops import kernel_cache, serve
from tests.db.samples import H200, MEASURED
from tests.fakes.driver import FakeDriver
from tests.fakes.gpu import EmulatedGpu, FakeGpu, MadeAnew
from tests.fakes.gpu_zero import on_gpu_zero
from tests.fakes.turns import Turns, imagined_gpu
from tests.fakes.uncompiled import compile_nothing
from tests.runtime.ladders import Ladder
from tests.tiers import first

AnyGpu = TypeVar("AnyGpu", bound=FakeGpu)


@pytest.fixture
def ladder(tmp_path: Path, own_settings: Path, monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """Empty layers; the user's is the one that settings name."""
    folder = tmp_path / "tuning_db"
    folder.mkdir()
    monkeypatch.setattr(layers, "shipped", lambda name: {"tuning_db": folder}[name])
    return Ladder(user_path=own_settings / "tuning.sqlite3", shipped_folder=folder)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    serve.reload()
    monkeypatch.setattr(kernel_cache, "KERNELS", {})
    monkeypatch.setattr(serve, "_PLANS", {})
    yield
    serve.reload()


@pytest.fixture
def gpu(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """An H200 on which nothing is compiled or launched; its databases are those of `ladder`."""
    return _installed(FakeGpu(), monkeypatch)


@pytest.fixture(params=first(1, [False, True]), ids=["one way", "both ways"])
def turns(ladder: Ladder, request: pytest.FixtureRequest) -> Iterator[Turns]:
    """An H200 on which calls of many kinds are made in turns; its databases are those of `ladder`."""
    with imagined_gpu(both_ways=request.param) as fake:
        yield fake


@pytest.fixture
def emulated(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """An H200 that computes in torch, on tensors of the CPU."""
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)
    return _installed(EmulatedGpu(), monkeypatch)


@pytest.fixture
def bare_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver that keeps what kernels would have read, and tensors of the CPU that claim to be on GPU 0."""
    fake = FakeDriver()
    compile_nothing(monkeypatch)
    with on_gpu_zero(fake, monkeypatch):
        yield fake


@pytest.fixture
def driver(bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The same of the only GPU, whose streams are not captured; no step of decoding was launched before."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    runs.forget()
    plans.PLANS.clear()
    decode_plan._SHARED.clear()
    yield bare_driver
    runs.forget()
    plans.PLANS.clear()


def _installed(fake: AnyGpu, monkeypatch: pytest.MonkeyPatch) -> AnyGpu:
    monkeypatch.setattr(serve, "device_at", lambda index: H200)
    monkeypatch.setattr(serve, "prepare", fake.counting(serve.prepare))
    monkeypatch.setattr(build, "compile_kernel", fake.compile_kernel)
    monkeypatch.setattr(binaries, "read", lambda *asked: None)
    monkeypatch.setattr(binaries, "write", lambda *kernel: None)
    monkeypatch.setattr(plan, "OpenPlan", MadeAnew)
    monkeypatch.setattr(plan, "make_plan", fake.make_plan)
    monkeypatch.setattr(plan, "make_backward_plan", fake.make_backward_plan)
    monkeypatch.setattr(plan, "load", fake.load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


@pytest.fixture(autouse=True)
def compiled_quickly() -> Iterator[None]:
    """Without LLVM's optimizations, a sixth of a compile: calls are about what kernels are given.

    Parameters and shared memory are the same, and nothing here looks at machine code, registers or spills. Triton's
    cache keeps the two apart.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_LLVM_OPT", "1")
        yield


@pytest.fixture(autouse=True)
def versions_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The software here is that of the records in tests, whatever is installed: nothing is out of date by chance."""
    monkeypatch.setattr(nvml, "versions", lambda: MEASURED.versions)


@pytest.fixture
def fresh_compiler() -> None:
    """Nothing that torch has compiled in other tests, which counts towards its limits."""
    torch._dynamo.reset()
