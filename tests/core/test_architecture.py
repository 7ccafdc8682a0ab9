"""What architectures can do, and what is taken of one that nobody has described."""

from __future__ import annotations

import pytest

from flashgen.core.architecture import ARCHITECTURES, Architecture, architecture
from flashgen.core.device import CATALOGUE, find_device
from flashgen.core.errors import DeviceError


def test_every_catalogued_device_has_an_architecture_with_a_row() -> None:
    assert {device.arch for device in CATALOGUE} == ARCHITECTURES.keys()
    for name, row in ARCHITECTURES.items():
        assert row.name == name


@pytest.mark.parametrize(
    ("name", "mma", "async_copy", "tma", "tensor_memory", "tf32", "warpgroup"),
    [
        ("a100", "mma", True, False, False, True, False),
        ("rtx 4090", "mma", True, False, False, True, False),
        ("h100", "wgmma", True, True, False, True, True),
        ("b200", "tcgen05", True, True, True, True, True),
        ("rtx 5090", "mma", True, True, False, True, False),
        ("mi300x", "mfma", False, False, False, True, False),
        ("rx 9060 xt", "wmma", False, False, False, False, False),
    ],
)
def test_devices_say_what_they_can_do(
    name: str, mma: str, async_copy: bool, tma: bool, tensor_memory: bool, tf32: bool, warpgroup: bool
) -> None:
    device = find_device(name)
    assert device.mma == mma
    assert (device.has_async_copy, device.has_tma, device.has_tensor_memory) == (async_copy, tma, tensor_memory)
    assert (device.has_tf32, device.has_warpgroup_mma) == (tf32, warpgroup)
    assert device.has_wgmma is (mma == "wgmma")


def test_an_unknown_architecture_can_what_all_of_its_vendor_can() -> None:
    old, ampere, newer = (architecture(name, 32) for name in ("sm75", "sm87", "sm121"))
    assert (old.mma, old.has_async_copy) == ("", False)
    assert (ampere.mma, ampere.has_async_copy, ampere.has_tma) == ("mma", True, False)
    assert (newer.mma, newer.has_async_copy, newer.has_tma) == ("mma", True, True)
    assert not newer.has_tensor_memory
    assert (architecture("gfx90a", 64).mma, architecture("gfx1100", 32).mma) == ("mfma", "wmma")
    assert architecture("gfx90a", 64).name == "gfx90a"


def test_a_kind_of_tensor_cores_is_one_that_kernels_know() -> None:
    with pytest.raises(DeviceError, match="mma is one of mma, wgmma, tcgen05, mfma, wmma or empty, got 'cube'"):
        Architecture(name="sm150", mma="cube")
