"""`devices` and `doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashgen.cli import arguments, machine
from flashgen.core.device import CATALOGUE, find_device
from flashgen.core.settings import settings
from tests.cli.conftest import Invoke


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "device_here", lambda: None)


@pytest.fixture
def h100_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "device_here", lambda: find_device("h100"))


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


def test_doctor_is_content_with_this_machine(invoke: Invoke, no_gpu: None, tuned: Path) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.stdout
    assert f"3 records, 2 trials: {tuned}" in result.stdout
    assert "none that torch can use" in result.stdout
    assert str(settings().cache_dir) in result.stdout


def test_doctor_makes_no_database(invoke: Invoke, no_gpu: None) -> None:
    assert "will be made by the first tuning" in invoke("doctor").stdout
    assert not settings().db_layers[0].exists()


def test_doctor_names_a_bad_database_and_fails(invoke: Invoke, no_gpu: None, tuned: Path) -> None:
    tuned.write_bytes(b"not a database " * 500)
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    (bad,) = [check for check in json.loads(result.stdout) if check["state"] == "bad"]
    assert str(tuned) in bad["detail"]


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("torch", "2.10.1", "bad"),
        ("torch", "2.11.0+cu130", "ok"),
        ("torch", "", "bad"),
        ("triton", "3.5.1", "note"),
        ("triton", "3.6.0", "ok"),
        ("triton", "3.10.0", "note"),
        ("triton", "", "bad"),
    ],
)
def test_doctor_judges_versions(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch, package: str, version: str, state: str
) -> None:
    found = {"torch": "2.13.0", "triton": "3.7.1", package: version}
    monkeypatch.setattr(machine, "_version", lambda name: found[name])
    checks = {check["name"]: check for check in json.loads(invoke("doctor", "--json").stdout)}
    assert checks[package]["state"] == state


def test_doctor_notes_a_gpu_without_records(invoke: Invoke, h100_here: None) -> None:
    shown = invoke("doctor").stdout
    assert "none for NVIDIA H100: `flashgen tune` makes them" in shown


def test_doctor_notes_settings_that_change_serving(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    settings.cache_clear()
    shown = invoke("doctor").stdout
    assert "FLASHGEN_NO_COMPILE" in shown
    assert "SDPA never serves" in shown
