"""The page of each device whose records ship: what it is, how many records there are, and who measured with what.

`make databases` writes `tuning_db/<device>/README.md` from the database beside it; a test fails while one is out of
date. Limits and clocks of the card are in no record: `--read-machine` writes them to `machine.json` in the same folder,
on the machine that measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import printable
from flashgen.core.record import TuningRecord
from flashgen.db.past import Whole, whole
from flashgen.db.store import Store

FOLDER = Path(__file__).parents[1] / "tuning_db"
RECORDS, MACHINE, PAGE = "records.sqlite3", "machine.json", "README.md"

LIMITS = {
    "power_limit_w": ("power limit", "W"),
    "max_sm_clock_mhz": ("highest SM clock", "MHz"),
    "max_memory_clock_mhz": ("highest memory clock", "MHz"),
}
"""What `machine.json` says, by its keys."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or the machine's limits into a folder."""
    parser = argparse.ArgumentParser(prog="scripts/device_pages.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: %(default)s")
    parser.add_argument("--read-machine", type=Path, metavar="FOLDER", help="write what this GPU's driver says of it")
    parsed = parser.parse_args(arguments)
    if parsed.read_machine is not None:
        (parsed.read_machine / MACHINE).write_text(json.dumps(machine(), indent=2) + "\n")
        return 0
    for path in sorted(parsed.folder.glob(f"*/{RECORDS}")):
        write(path)
    return 0


def write(path: Path) -> None:
    """Write the page of a database, beside it.

    Raises:
        DatabaseError: a row breaks a rule, or it has records of another device than its folder is named after.
    """
    (path.parent / PAGE).write_text(page(path))


def page(path: Path) -> str:
    """The page of a database whose folder belongs to one device.

    Raises:
        DatabaseError: a row breaks a rule, or it has records of another device than its folder is named after.
    """
    with Store.open(path, shipped=True) as store:
        known = whole(store.reader)
    device = device_of(path, known.records)
    limits = path.with_name(MACHINE)
    parts = [
        f"# {plain(device.name)}\n",
        "<!-- written by `make databases` from the files beside it -->\n",
        *table(
            ("", ""),
            [*facts(device, known), *machine_facts(json.loads(limits.read_text()) if limits.is_file() else {})],
        ),
        "\n## Records\n",
        *table(("pass", "dtype", "records", "measured", "on hard data too"), counts(known.records)),
    ]
    return "\n".join(parts) + "\n"


def device_of(path: Path, records: Iterable[TuningRecord]) -> Device:
    """The one device of all records.

    Raises:
        DatabaseError: there are none or several, or the folder has another name than theirs.
    """
    devices = {record.device.identity: record.device for record in records}
    if {device.folder for device in devices.values()} != {path.parent.name}:
        named = sorted(device.folder for device in devices.values())
        raise DatabaseError(f"a folder has the records of the device that it is named after, got {named} in {path}")
    return next(iter(devices.values()))


def facts(device: Device, known: Whole) -> Iterator[tuple[str, str]]:
    """What the device is, and when, with what and by whom it was measured."""
    records = known.records
    clocks = [record.measurement.sm_clock_mhz for record in records if record.measurement is not None]
    seen = [clock for clock in clocks if clock]
    yield "identity", f"`{device.identity}`"
    yield "SMs", f"{device.num_sms} of {device.arch}"
    yield "memory", f"{device.memory_gb} GB, {device.bandwidth_gbs:g} GB/s by the data sheet"
    yield "dense bf16 peak", f"{device.peak_tflops:g} TFLOP/s by the data sheet"
    if seen:
        yield "SM clock while measuring", f"{min(seen):g} to {max(seen):g} MHz, median {statistics.median(seen):g}"
    days = sorted(record.created[:10] for record in records)
    yield "measured", " to ".join(dict.fromkeys((plain(days[0]), plain(days[-1]))))
    for what in ("flashgen", "triton", "torch", "driver"):
        yield what, counted(getattr(record.versions, what) for record in records)
    runs = {origin.run for origin in known.origins.values()}
    nobody = len(records) - len(known.origins)
    by = counted(origin.host for origin in known.origins.values())
    yield "by host", f"{by or '-'}; {len(runs)} runs; of {nobody} records nobody wrote it down"
    yield "replaced records in the history", str(len(known.replaced))


def machine_facts(limits: dict[str, object]) -> list[tuple[str, str]]:
    """The limits of the card that the driver stated."""
    return [(words, f"{limits[key]:g} {unit}") for key, (words, unit) in LIMITS.items() if key in limits]


def counts(records: Sequence[TuningRecord]) -> list[tuple[str, ...]]:
    """A row for each pass and dtype, and one for all."""
    groups: dict[tuple[str, str], list[TuningRecord]] = {}
    for record in records:
        groups.setdefault((record.workload.direction, record.workload.dtype), []).append(record)
    rows = [(*names, *numbers(found)) for names, found in sorted(groups.items())]
    return [*rows, ("all", "", *numbers(records))]


def numbers(records: Sequence[TuningRecord]) -> tuple[str, ...]:
    """How many there are, how many of them were measured, and on hard data too."""
    measured = [record.measurement for record in records if record.measurement is not None]
    return str(len(records)), str(len(measured)), str(sum(bool(each.hard_times_ms) for each in measured))


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def counted(values: Iterable[str]) -> str:
    """Each value and how many records have it, the most frequent first; those without one are left out."""
    found = Counter(value for value in values if value)
    return ", ".join(
        f"{plain(value)} ({number})" for value, number in sorted(found.items(), key=lambda i: (-i[1], i[0]))
    )


def plain(text: str) -> str:
    """A text of a database as a cell shows it, whatever it is: no markup, no link, no line break."""
    return "".join(each if each.isalnum() or each in " .+-_:" else f"&#{ord(each)};" for each in printable(text[:100]))


def machine() -> dict[str, float]:
    """Limits and highest clocks of the first GPU, from its driver."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    }


if __name__ == "__main__":
    sys.exit(main())
