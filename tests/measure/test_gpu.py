from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashgen.core.device import find_device
from flashgen.core.errors import DeviceError
from flashgen.measure import gpu
from flashgen.measure.baselines import BACKENDS, unsupported
from flashgen.measure.faults import failure_of, gpu_is_lost

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_000_000_000,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    L2_cache_size=62914560,
    gcnArchName="",
)


def test_a_known_gpu_gets_the_catalogues_bandwidth_and_peak() -> None:
    assert gpu.device_of(H200, is_hip=False) == find_device("h200")


def test_an_unknown_gpu_gets_zeros() -> None:
    slice_of_one = SimpleNamespace(**{**vars(H200), "multi_processor_count": 16, "total_memory": 19_000_000_000})
    device = gpu.device_of(slice_of_one, is_hip=False)
    assert device.identity == "sm90-16sm-16gb"
    assert (device.bandwidth_gbs, device.peak_tflops) == (0.0, 0.0)
    assert device.smem_per_block == 232448


def test_an_amd_gpu_is_named_by_its_architecture() -> None:
    properties = SimpleNamespace(
        **{
            **vars(H200),
            "name": "AMD Instinct MI300X",
            "gcnArchName": "gfx942:sramecc+:xnack-",
            "multi_processor_count": 304,
            "total_memory": 192 * 2**30,
            "warp_size": 64,
            "shared_memory_per_block": 65536,
        }
    )
    del properties.shared_memory_per_block_optin
    device = gpu.device_of(properties, is_hip=True)
    assert device.identity == find_device("mi300x").identity
    assert device.peak_tflops == find_device("mi300x").peak_tflops
    assert device.smem_per_block == 65536


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what happens without a GPU")
def test_without_a_gpu_everything_says_so_and_nothing_fails() -> None:
    with pytest.raises(DeviceError, match="needs a GPU"):
        gpu.current_device()
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
    monkeypatch.setattr(gpu, "_nvml", lambda: FakeNvml(*pids))
    monkeypatch.setattr(gpu, "_handle", lambda index: None)
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
