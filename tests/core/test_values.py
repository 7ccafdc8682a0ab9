"""Devices, configs, records and settings."""

from __future__ import annotations

import os
import pwd
import tempfile
import warnings
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from flashgen.core import settings as settings_module
from flashgen.core.config import Config
from flashgen.core.device import (
    CATALOGUE,
    DRIVER_NAMES,
    SOLD_POWER_W,
    Device,
    find_among,
    find_device,
    memory_class_gb,
    unusual_power_w,
)
from flashgen.core.errors import ConfigError, DeviceError, MeasureError, SettingError
from flashgen.core.record import SPLIT, Baseline, Failure, Measurement, TuningRecord, age
from flashgen.core.settings import settings
from flashgen.core.workload import Workload


def test_identities_tell_models_apart() -> None:
    identities = [device.identity for device in CATALOGUE]
    assert len(set(identities)) == len(identities)
    assert find_device("h200").identity == "sm90-132sm-141gb"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "NVIDIA H100"),
        ("sm_86", "NVIDIA RTX 3090"),
        ("RTX 4090", "NVIDIA RTX 4090"),
        ("4090", "NVIDIA RTX 4090"),
        ("nvidia_h200", "NVIDIA H200"),
        ("gfx942", "AMD MI300X"),
        ("sm90-114sm-80gb", "NVIDIA H100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("AMD Instinct MI300X", "AMD MI300X"),
    ],
)
def test_devices_are_found_by_the_names_people_use(text: str, name: str) -> None:
    assert find_device(text).name == name


def test_devices_of_databases_are_found_by_the_same_names_behind_the_catalogued_ones() -> None:
    known = find_device("rtx 4090")
    laptop = replace(known, name="NVIDIA GeForce RTX 4090 Laptop GPU", num_sms=76, memory_gb=16)
    namesake = replace(known, name="NVIDIA H200", num_sms=99)
    nameless = replace(known, name="\u663e\u5361", num_sms=98)
    small, large = (replace(known, name=f"T4 ({sms})", arch="sm75", num_sms=sms) for sms in (40, 72))
    thief = replace(known, name=laptop.identity, num_sms=97)
    stored = (laptop, namesake, nameless, small, large, thief)
    for text in (laptop.name, "geforce-rtx-4090-laptop-gpu", laptop.identity):
        assert find_among(text, stored) == laptop
    assert find_among("h200", stored) == find_device("h200")
    assert find_among(namesake.identity, stored) == namesake
    assert find_among(nameless.name, stored) == nameless
    assert find_among("t4 40", stored) == small
    with pytest.raises(DeviceError, match=f"names several: {small.identity}, {large.identity}"):
        find_among("sm75", stored)
    for text in ("", "voodoo2"):
        with pytest.raises(DeviceError, match=rf"nvidia_h200.* {laptop.identity} \('NVIDIA GeForce RTX 4090 Laptop"):
            find_among(text, stored)


def test_what_drivers_report_are_names_of_the_cards_with_that_identity() -> None:
    catalogued = {device.name: device for device in CATALOGUE}
    for reported, name in DRIVER_NAMES.items():
        assert find_device(reported) == catalogued[name]
        if catalogued[name].is_nvidia:
            assert not unusual_power_w(catalogued[name], SOLD_POWER_W[reported])
    for other in ("NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"):
        with pytest.raises(DeviceError, match="a target is one of"):
            find_device(other)


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="nvidia_h200"):
        find_device("voodoo2")
    with pytest.raises(DeviceError, match="arch is like"):
        Device(name="x", arch="90", num_sms=1, memory_gb=1, smem_per_block=1, smem_per_sm=1)


@pytest.mark.parametrize(("gib", "size"), [(139.8, 141), (79.1, 80), (23.6, 24), (93.6, 94), (31.4, 32), (178.4, 180)])
def test_memory_classes_survive_what_a_driver_reserves(gib: float, size: int) -> None:
    assert memory_class_gb(int(gib * 2**30)) == size


def test_a_config_survives_json_and_keeps_types() -> None:
    config = Config.of("f", {"b": True, "a": 1, "c": "x"})
    again = Config.from_json("f", config.to_json())
    assert again == config
    assert [type(value) for _, value in again.knobs] == [int, bool, str]
    assert config.replace(a=2)["a"] == 2
    with pytest.raises(ConfigError, match="not 'z'"):
        config["z"]
    with pytest.raises(ConfigError, match="integer"):
        config.integer("b")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": null}', '{"a": 1.5}', '{"a": [1]}', "[" * 100000])
def test_knobs_that_are_not_plain_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Config.from_json("f", text)


def test_measurements_have_derived_numbers_and_refuse_nonsense() -> None:
    measured = Measurement(times_ms=(2.0, 1.0, 4.0), reference_ms=4.0)
    assert (measured.median_ms, measured.spread, measured.reference_ratio) == (2.0, 1.5, 0.5)
    for times in ((), (0.0,), (float("nan"),), (float("inf"),), (-1.0,)):
        with pytest.raises(MeasureError):
            Measurement(times_ms=times)
    with pytest.raises(MeasureError, match="stage"):
        Failure(stage="moon", reason="eclipse")


def test_a_record_is_measured_iff_it_has_a_measurement() -> None:
    work, device = Workload.parse("b1-h1-s1024-d64"), find_device("h200")
    config = Config.of("f", {})
    record = TuningRecord(
        workload=work,
        device=device,
        config=config,
        provenance="measured",
        measurement=Measurement(times_ms=(2.0,)),
        baselines=tuple(Baseline(impl=impl, median_ms=ms) for impl, ms in (("a", 3.0), ("b", 1.0), (SPLIT, 0.5))),
    )
    assert record.best_baseline == Baseline(impl="b", median_ms=1.0)
    assert record.tflops == pytest.approx(work.flops / 2e-3 / 1e12)
    with pytest.raises(MeasureError, match="iff"):
        TuningRecord(workload=work, device=device, config=config, provenance="measured")


def test_database_layers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHGEN_DB", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    settings.cache_clear()
    assert settings().db_layers == (tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("name", "value"), [("FLASHGEN_POLICY", "slowest"), ("FLASHGEN_NO_COMPILE", "yes")])
def test_a_wrong_setting_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    settings.cache_clear()
    with pytest.raises(SettingError, match=f"{name}.*{value}"):
        settings()


@pytest.mark.parametrize("name", ["FLASHGEN_DB", "FLASHGEN_CACHE_DIR"])
@pytest.mark.parametrize(("value", "home"), [("~nosuchuser/x", "/root"), ("~/x", ""), ("~/x", "here"), ("~", "")])
def test_a_home_that_nobody_knows_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, home: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", home)
    settings.cache_clear()
    with pytest.raises(SettingError, match=f"{name} .*got '{value}'"):
        settings()


@pytest.mark.parametrize("home", ["here", "~"])
def test_without_a_usable_home_directories_are_absolute_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for name in ("FLASHGEN_DB", "FLASHGEN_CACHE_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # as in a container whose users have no names
    settings.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = settings()
        assert settings_module.triton_cache() == found.cache_dir / "triton"
    assert len(caught) == 2
    assert all("HOME is an absolute path" in str(each.message) for each in caught)
    assert found.cache_dir.is_absolute()
    assert found.db_layers[0].is_absolute()
    assert not (tmp_path / home).exists()


def test_relative_paths_are_those_of_the_directory_in_which_they_were_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_DB", "a.sqlite3")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "cache")
    settings.cache_clear()
    assert settings().db_layers == (tmp_path / "a.sqlite3",)
    assert settings().cache_dir == tmp_path / "cache"


def test_a_home_that_cannot_be_written_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory is wanted")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    settings.cache_clear()
    with pytest.warns(UserWarning, match="FLASHGEN_CACHE_DIR"):
        found = settings().cache_dir
    assert found.is_dir()
    assert found.parent == tmp_path
    assert found.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("created", "expected"),
    [
        ("2026-11-20T12:00:00+00:00", "moments"),
        ("2026-11-20T11:59:00Z", "1 minute"),
        ("2026-11-20T09:00:00+00:00", "3 hours"),
        ("2026-11-20T09:00:00", "3 hours"),
        ("2026-10-01T00:00:00+00:00", "50 days"),
        ("2027-01-01T00:00:00+00:00", "moments"),
        ("", ""),
    ],
)
def test_ages_are_said_in_the_largest_unit(created: str, expected: str) -> None:
    assert age(created, datetime(2026, 11, 20, 12, 0, 5, tzinfo=timezone.utc)) == expected
