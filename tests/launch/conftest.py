"""The fake driver in the place of CUDA's, torch's CUDA calls that a CPU build lacks, and a bundle that is trusted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashgen.core.settings import settings
from flashgen.launch import allocation, driver, plan, scratch
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import imagined_family


@pytest.fixture(autouse=True)
def imagined_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "family", imagined_family)


class Streams:
    """What torch says the current stream and device are."""

    current = 0
    device = 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    state = Streams()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, state.device = state.device, index
        yield
        state.device = before

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(allocation.GUARDS, "_empty_strided_cuda", allocation.GUARDS._empty_strided_cpu)
    return state


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(plan, "_FUNCTIONS", {})
    driver._primary_context.cache_clear()
    yield fake
    driver._primary_context.cache_clear()


@pytest.fixture
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    from tests.launch.bundle_files import two_kernels

    path = tmp_path / "h200.kernels"
    path.write_bytes(two_kernels())
    return path


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_BINARIES", "trusted")
    settings.cache_clear()
