"""Device pages say what the files beside them say, and nothing that a foreign database could put there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.db.exchange import export_records
from scripts import device_pages
from tests.db.samples import H100, H200, MEASURED, ORIGIN, REPLACED, SHORT

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return tmp_path / H200.folder / device_pages.RECORDS


def rows_of(page: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[-1] for cells in lines}


def test_a_page_says_what_the_database_says(records: Path) -> None:
    found = [MEASURED, replace(MEASURED, workload=SHORT)]
    export_records(found, records, origins={MEASURED.identity: ORIGIN}, replaced=[REPLACED])
    assert device_pages.main([str(records.parents[1])]) == 0
    page = (records.parent / "README.md").read_text()
    rows = rows_of(page)
    assert page.startswith("# NVIDIA H200\n")
    assert rows["identity"] == "`sm90-132sm-141gb`"
    assert rows["triton"] == f"{MEASURED.versions.triton} (2)"
    assert rows["by host"] == f"{ORIGIN.host} (1); 1 runs; of 1 records nobody wrote it down"
    assert rows["replaced records in the history"] == "1"
    assert rows["all"].replace(" ", "") == "|2|2|0"
    assert "power limit" not in rows


def test_the_driver_states_the_limits(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: "gpu",
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: {1: 1980, 2: 3201}[kind],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    export_records([MEASURED], records)
    assert device_pages.main(["--read-machine", str(records.parent)]) == 0
    stated = json.loads((records.parent / "machine.json").read_text())
    assert stated == {"power_limit_w": 700, "max_sm_clock_mhz": 1980, "max_memory_clock_mhz": 3201}
    rows = rows_of(device_pages.page(records))
    assert [rows[name] for name in ("power limit", "highest SM clock")] == ["700 W", "1980 MHz"]


@pytest.mark.parametrize("others", [[], [replace(MEASURED, device=H100)]])
def test_a_folder_has_the_records_of_its_device_alone(others: list[object], tmp_path: Path) -> None:
    path = tmp_path / (H200.folder if others else "elsewhere") / device_pages.RECORDS
    export_records([MEASURED, *others], path)  # type: ignore[list-item]
    with pytest.raises(DatabaseError, match="named after"):
        device_pages.page(path)


def test_what_a_foreign_database_names_is_text(tmp_path: Path) -> None:
    device = replace(H200, name="../<img src=x>|[a](b) # `x` *b*")
    path = tmp_path / device.folder / device_pages.RECORDS
    export_records([replace(MEASURED, device=device)], path)
    title = device_pages.page(path).splitlines()[0].removeprefix("# ")
    assert not set(title) & set("<>|[]()`*/")
