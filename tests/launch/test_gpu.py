"""What torch reports of a GPU as a value of the core; a GPU of the catalogue gets its figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashgen.core.device import SOLD_POWER_W, find_device
from flashgen.core.errors import DeviceError
from flashgen.launch.gpu import current_device, device_of

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
    assert device_of(H200, is_hip=False) == find_device("h200")


def test_an_unknown_gpu_gets_zeros() -> None:
    slice_of_one = SimpleNamespace(**{**vars(H200), "multi_processor_count": 16, "total_memory": 19_000_000_000})
    device = device_of(slice_of_one, is_hip=False)
    assert device.identity == "sm90-16sm-16gb"
    assert (device.bandwidth_gbs, device.peak_tflops) == (0.0, 0.0)
    assert device.smem_per_block == 232448


@pytest.mark.parametrize(
    ("sold_w", "identity"),
    [
        (700, "sm90-132sm-141gb"),
        (690, "sm90-132sm-141gb"),
        (0, "sm90-132sm-141gb"),
        (600, "sm90-132sm-141gb-600w"),
    ],
)
def test_a_card_of_another_power_has_an_identity_of_its_own(sold_w: int, identity: str) -> None:
    device = device_of(H200, is_hip=False, sold_w=sold_w)
    assert device.identity == identity
    assert device.peak_tflops == find_device("h200").peak_tflops
    assert device.may_use(find_device("h200"))
    assert find_device("h200").may_use(device) is (identity == "sm90-132sm-141gb")
    assert SOLD_POWER_W["NVIDIA H200 NVL"] == 600


def test_a_slice_of_a_card_is_no_card() -> None:
    whole = SimpleNamespace(**{**vars(H200), "name": "NVIDIA H200 MIG 7g.141gb"})
    assert device_of(whole, is_hip=False).identity == "sm90-132sm-141gb-mig"


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
    device = device_of(properties, is_hip=True)
    assert device.identity == find_device("mi300x").identity
    assert device.peak_tflops == find_device("mi300x").peak_tflops
    assert device.smem_per_block == 65536


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what happens without a GPU")
def test_without_a_gpu_there_is_no_device() -> None:
    with pytest.raises(DeviceError, match="a GPU that torch can use is needed"):
        current_device()
