from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashgen.launch import nvml
from flashgen.launch.sdpa import BACKENDS
from flashgen.measure import gpu
from flashgen.measure.baselines import unsupported
from flashgen.measure.faults import failure_of, gpu_is_lost


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what happens without a GPU")
def test_without_a_gpu_everything_says_so_and_nothing_fails() -> None:
    assert gpu.sm_clock_mhz() is None
    assert gpu.other_processes() == []
    assert not gpu_is_lost()


def test_versions_name_what_is_installed() -> None:
    found = gpu.versions()
    assert found.torch == torch.__version__
    assert found.triton


class FakeNvml:
    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=pid * 10**9) for pid in self._pids]

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        raise self.NVMLError("not supported")


@pytest.mark.parametrize(
    ("pids", "context", "expected"),
    [
        ((77,), True, []),
        ((77, 5), True, ["process 5 (5.0 GB)"]),
        ((5, 6), True, ["process 6 (6.0 GB)"]),  # a container: one of them is this process
        ((5, 6), False, ["process 5 (5.0 GB)", "process 6 (6.0 GB)"]),
        ((), True, []),
    ],
)
def test_other_processes_are_told_from_this_one(
    monkeypatch: pytest.MonkeyPatch, pids: tuple[int, ...], context: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(nvml, "nvml", lambda: FakeNvml(*pids))
    monkeypatch.setattr(gpu, "handle", lambda index: None)
    monkeypatch.setattr(gpu.os, "getpid", lambda: 77)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: context)
    assert gpu.other_processes() == expected
    assert gpu.sm_clock_mhz() is None


@pytest.mark.parametrize(
    ("error", "stage"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (MemoryError(), "memory"),
        (type("OutOfResources", (Exception,), {})("out of resource: shared memory"), "resources"),
        (RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources"), "resources"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), "verify"),
    ],
)
def test_an_exception_becomes_a_failure_of_its_kind(error: Exception, stage: str) -> None:
    failure = failure_of(error, "verify")
    assert failure.stage == stage
    assert failure.reason
    assert "\n" not in failure.reason


@pytest.mark.parametrize(
    ("key", "able"),
    [
        ("b1-h2-s64-d64", {"sdpa-flash", "sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h2-s64-d64-causal", {"sdpa-flash", "sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h2-sq1-sk64-d64-causal", {"sdpa-flash", "sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h2-sq32-sk64-d64-causal", {"sdpa-flash", "sdpa-efficient"}),
        ("b1-h4-hk2-sq32-sk64-d64-causal", {"sdpa-flash"}),
        ("b1-h2-s64-d64-bias", {"sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h2-s64-d64-keymask", {"sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h2-s64-d64-bias-mask", set()),
        ("b1-h2-s64-d64-bias-causal", set()),
        ("b1-h2-hk1-s64-d64-mask", set()),
        ("b1-h2-s64-d64-softcap", set()),
        ("b1-h2-s64-d64-wl8", set()),
        ("bwd-b1-h2-s64-d64", set()),
    ],
)
def test_torchs_backends_are_asked_for_what_they_can_express(key: str, able: set[str]) -> None:
    from flashgen.core.workload import Workload

    assert {impl for impl in BACKENDS if unsupported(impl, Workload.parse(key)) is None} == able
