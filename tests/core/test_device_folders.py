"""The name of a device's folder: safe whatever a driver or a foreign database calls the device, and its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flashgen.core.device import CATALOGUE, find_device

H200 = find_device("h200")


def test_catalogued_devices_have_their_names() -> None:
    assert H200.folder == "nvidia_h200"
    assert len({device.folder for device in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize(
    "name",
    ["", "..", "../../etc/passwd", "/", "CON", "nul.txt", "-rf", "a\0b", "a\nb", "GPU 東京", "İ" * 300, "x" * 5000],
)
def test_any_name_gives_a_safe_folder(name: str) -> None:
    folder = replace(H200, name=name, num_sms=2**62).folder
    assert re.fullmatch(r"([a-z0-9][a-z0-9_]*-)?sm90-\d+sm-141gb", folder)
    assert len(folder) < 100


def test_devices_that_look_ups_tell_apart_share_no_folder() -> None:
    slice_of_it = replace(H200, num_sms=60, memory_gb=71)
    namesake = replace(find_device("h100"), name="NVIDIA H200")
    assert len({each.folder for each in (H200, slice_of_it, namesake)}) == 3
