"""`doctor`: whatever is missing or wrong is a line of its report, and nothing ends the report early."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flashgen.cli import doctor
from flashgen.core.device import find_device
from flashgen.core.settings import VARIABLES, settings
from flashgen.db.store import Store
from flashgen.launch import nvml
from flashgen.measure import gpu
from tests.cli.conftest import ROOT, Invoke
from tests.db.samples import MEASURED
from tests.tiers import EXHAUSTIVE


def report(invoke: Invoke) -> dict[str, dict[str, str]]:
    """The checks of `doctor --json` by their names."""
    result = invoke("doctor", "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == int(any(check["state"] == "bad" for check in checks.values()))
    return checks


def test_doctor_is_content_with_this_machine(invoke: Invoke, no_gpu: None, tuned: Path) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.stdout
    assert f"3 records, 2 tried configs: {tuned}" in result.stdout
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
    monkeypatch.setattr(doctor, "_version", lambda name: found.get(name, "99"))
    checks = {check["name"]: check for check in json.loads(invoke("doctor", "--json").stdout)}
    assert checks[package]["state"] == state


def test_doctor_notes_a_gpu_without_records(invoke: Invoke, h100_here: None, nothing_ships: None) -> None:
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


HIDE = "import sys; sys.modules.update(dict.fromkeys({names!r})); from flashgen.cli.main import main; main()"


def without(names: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `flashgen <arguments>` in a process that cannot import these."""
    line = [sys.executable, "-c", HIDE.format(names=names), *arguments]
    return subprocess.run(
        line, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
    )


def test_doctor_reports_packages_that_cannot_be_imported() -> None:
    result = without(["torch", "triton", "pynvml", "sqlalchemy"], "doctor", "--json")
    assert result.returncode == 1, result.stderr
    assert result.stderr == ""
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    for name in ("torch", "triton", "database"):
        assert checks[name]["state"] == "bad", checks[name]
    assert "cannot be imported" in checks["torch"]["detail"]
    assert "sqlalchemy" in checks["database"]["detail"]
    assert checks["GPU"]["detail"] == "not checked without torch"
    assert checks["cache"]["state"] == "ok"


@EXHAUSTIVE
def test_without_torch_kernels_of_others_are_listed_and_rendered_and_the_rest_says_so() -> None:
    assert "NVIDIA H200" in without(["torch"], "devices").stdout
    config = "portable_forward:block_m=64"
    assert "def portable_forward(" in without(["torch"], "render", "fwd-bf16-d64", "--config", config).stdout
    result = without(["torch"], "tune", "--shape", "b1-h1-s64-d64", "--target", "a100")
    assert result.returncode == 1
    assert result.stderr == "error: this needs the package torch, which is missing (see `flashgen doctor`)\n"


@pytest.mark.parametrize(
    ("variable", "value"), [("FLASHGEN_POLICY", "quickest"), ("FLASHGEN_NO_COMPILE", "yes"), ("FLASHGEN_QUIET", "2")]
)
def test_doctor_reports_a_wrong_environment_variable(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    settings.cache_clear()
    checks = report(invoke)
    assert checks["environment"]["state"] == "bad"
    assert checks["environment"]["detail"].startswith(variable)
    assert checks["torch"]["state"] == "ok"
    assert "not checked" in checks["database"]["detail"]


def test_doctor_notes_places_that_cannot_be_written(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHGEN_DB", str(tmp_path / "file" / "tuning.sqlite3"))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    settings.cache_clear()
    checks = report(invoke)
    assert "tuning could store nothing" in checks["database"]["detail"]
    assert "cannot be used" in checks["environment"]["detail"]
    assert checks["Triton's cache"]["state"] == "bad"


def test_a_check_that_cannot_be_made_is_a_finding(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> object:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setitem(doctor.PROBES, "GPU", broken)
    checks = report(invoke)
    assert checks["GPU"] == {"name": "GPU", "state": "bad", "detail": "ZeroDivisionError: by nothing"}
    assert {"torch", "triton", "cache"} <= checks.keys()


def test_doctor_names_a_triton_that_torch_was_not_built_for(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_triton_of_torch", lambda: "3.6.0")
    assert "was built for 3.6.0" in report(invoke)["triton"]["detail"]


def test_doctor_knows_what_flashgen_needs() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {}
    for requirement in map(Requirement, project["dependencies"]):
        (bound,) = requirement.specifier
        needed[requirement.name] = tuple(map(int, bound.version.split(".")[:2]))
    del needed[doctor.NVML]  # of any version: without it there is a note
    assert needed == {"torch": doctor.OLDEST_TORCH, "triton": doctor.OLDEST_TRITON, **doctor.OTHER_PACKAGES}


def test_a_package_that_is_missing_or_too_old_is_named(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"torch": "2.13.0", "triton": "3.7.1", "optuna": "4.9.1", "rich": ""}
    monkeypatch.setattr(doctor, "_version", lambda name: found.get(name, "99"))
    checks = report(invoke)
    assert checks["optuna"]["detail"] == "4.9.1: 5 or newer is needed"
    assert checks["rich"]["detail"] == "missing: 13 or newer is needed"
    assert "jinja2" not in checks


def test_a_library_that_kills_its_process_is_a_finding_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deadly.py").write_text(r"import os; os.write(2, b'FATAL: no\nlibrary'); os.abort()")
    (tmp_path / "endless.py").write_text("import time; time.sleep(600)")
    (tmp_path / "raising.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "IMPORT_S", 1)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    check = doctor._imported("deadly", "1.0")
    assert check is not None
    assert (check.state, check.detail) == ("bad", "1.0 ends the process that imports it: FATAL: no library")
    with pytest.raises(ImportError):
        importlib.import_module("deadly")
    check = doctor._imported("endless", "1.0")
    assert check is not None
    assert "not done after 1 s" in check.detail
    check = doctor._imported("raising", "1.0")
    assert check is not None
    assert check.detail == "1.0 cannot be imported: libcuda.so.1: cannot open"


def test_misspelt_variables_are_named(invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACH_DIR", "/somewhere")
    monkeypatch.setenv("FLASHGEN_POLICY", "fastst")
    settings.cache_clear()
    checks = report(invoke)
    assert checks["FLASHGEN_CACH_DIR"]["detail"].endswith("did you mean FLASHGEN_CACHE_DIR?")
    assert checks["environment"]["detail"].endswith("did you mean fastest?")


def test_signatures_without_keys_are_noted(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    settings.cache_clear()
    assert "names no key" in report(invoke)["FLASHGEN_SIGNATURES"]["detail"]
    monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(tmp_path / "nowhere.pub"))
    settings.cache_clear()
    checks = report(invoke)
    assert "FLASHGEN_SIGNATURES" not in checks
    assert checks["FLASHGEN_TRUSTED_KEYS"]["state"] == "bad"


def test_the_variables_that_doctor_knows_are_those_of_the_settings() -> None:
    assert set(VARIABLES) == set(re.findall(r"FLASHGEN_[A-Z_]+", sys.modules[settings.__module__].__doc__ or ""))


def test_databases_that_are_not_there_are_named(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("FLASHGEN_DB", f"{tmp_path / 'loop'}:{tmp_path / 'nowhere.sqlite3'}")
    settings.cache_clear()
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "bad   database " in result.stdout
    assert f"{tmp_path / 'loop'} is a link that leads nowhere" in result.stdout
    assert f"{tmp_path / 'nowhere.sqlite3'} is not there" in result.stdout


def test_a_file_in_the_place_of_tritons_cache_is_named(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert report(invoke)["Triton's cache"]["state"] == "bad"


def test_versions_that_do_not_match_are_named(
    invoke: Invoke, h100_here: None, nothing_ships: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = replace(MEASURED, device=find_device("h100"), versions=replace(MEASURED.versions, triton="3.5.0"))
    with Store.open(settings().db_layers[0]) as store:
        store.put_records([record])
    monkeypatch.setattr(doctor, "_version", lambda name: {"flashgen": "0.0.9", "triton": "3.7.1"}.get(name, "99"))
    checks = report(invoke)
    assert checks["flashgen"]["detail"].endswith("installed is 0.0.9: install it again")
    assert checks["records"]["detail"].startswith("measured with Triton 3.5.0: ")


def test_a_gpu_that_the_driver_has_and_torch_has_not_is_named(
    invoke: Invoke, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(gpu, "gpus_of_driver", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(gpu, "driver_version", lambda: "535.54.03")
    found = report(invoke)["GPU"]["detail"]
    assert "(driver 535.54.03 has NVIDIA H200, torch is built for CUDA 13.0; CUDA_VISIBLE_DEVICES may hide it" in found


def test_the_gpus_of_the_driver_are_named_and_a_driver_that_refuses_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        NVMLError = ValueError

        def __init__(self, names: list[object]) -> None:
            self.names = names

        def nvmlDeviceGetCount(self) -> int:
            if not self.names:
                raise ValueError("no permission")
            return len(self.names)

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetName(self, handle: int) -> object:
            return self.names[handle]

    monkeypatch.setattr(nvml, "nvml", lambda: Nvml([b"NVIDIA H200", "NVIDIA A100"]))
    assert gpu.gpus_of_driver() == ["NVIDIA H200", "NVIDIA A100"]
    monkeypatch.setattr(nvml, "nvml", lambda: Nvml([]))
    assert gpu.gpus_of_driver() == []
