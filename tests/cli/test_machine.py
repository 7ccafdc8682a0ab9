"""`devices`."""

from __future__ import annotations

import json

from flashgen.core.device import CATALOGUE, find_device
from tests.cli.conftest import Invoke


def test_devices_lists_the_catalogue(invoke: Invoke, no_gpu: None) -> None:
    result = invoke("devices")
    for device in CATALOGUE:
        assert f"{device.name} " in result.stdout
        assert device.identity in result.stdout
    assert "no GPU here" in result.stderr
    assert "*" not in result.stdout


def test_devices_marks_the_gpu_of_this_machine(invoke: Invoke, h100_here: None) -> None:
    (line,) = [line for line in invoke("devices").stdout.splitlines() if line.startswith("*")]
    assert "sm90-132sm-80gb" in line
    rows = json.loads(invoke("devices", "--json").stdout)
    assert [row["name"] for row in rows if row["here"]] == ["NVIDIA H100"]
    assert len(rows) == len(CATALOGUE)


def test_every_listed_identity_is_a_target(invoke: Invoke, no_gpu: None) -> None:
    for row in json.loads(invoke("devices", "--json").stdout):
        assert find_device(row["identity"]).identity == row["identity"]
