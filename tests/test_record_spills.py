"""What pages say of spills of shipped records is in the CSV that `scripts/record_spills.py` wrote."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from scripts.machine_loops import PLACES
from scripts.record_spills import COLUMNS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/decisions/spilled-registers.md"
LOG = ROOT / "docs/experiments/spilled-registers.md"
RECORDS = 310
TRITONS = ("3.9.0", "3.7.1", "3.6.0")


def rows(triton: str) -> list[dict[str, str]]:
    with LOG.with_suffix(".csv").open() as file:
        return [row for row in csv.DictReader(file) if row["triton"] == triton]


def touches(row: dict[str, str], *places: str) -> int:
    return sum(int(row[f"{place}_{kind}"]) for place in places for kind in ("loads", "stores"))


def records(found: list[dict[str, str]]) -> int:
    """Records of these kernels; of a record with two kernels that spill, the one that most records have."""
    return sum({(row["specialization"], row["config"]): int(row["records"]) for row in found}.values())


def test_the_file_has_the_columns_that_the_script_writes() -> None:
    names = [*COLUMNS, *(f"{place}_{kind}" for place in PLACES for kind in ("loads", "stores"))]
    found = [row for triton in TRITONS for row in rows(triton)]
    assert all(list(row) == names and int(row["spills"]) > 0 and touches(row, *PLACES) > 0 for row in found)


def test_the_decision_counts_what_the_file_has() -> None:
    text = " ".join(PAGE.read_text().split())
    pattern = (
        r"Of (\d+) shipped records (\d+) spill under 3\.9\.0, and (\d+) of these .*?"
        r"under 3\.6\.0 (\d+) spill, and (\d+) of them so\. The (\d+) and the (\d+) others, 3\.7\.1 \((\d+) and (\d+)\)"
    )
    found = re.search(pattern, text)
    assert found is not None
    counts = []
    for triton in TRITONS:
        spilling = records(rows(triton))
        hot = records([row for row in rows(triton) if touches(row, "mainloop", "branch")])
        counts.append((spilling, spilling - hot, hot))
    (newest, outside, inside), (middle, middle_outside, _), (oldest, oldest_outside, oldest_inside) = counts
    expected = (RECORDS, newest, outside, oldest, oldest_outside, inside, oldest_inside, middle, middle_outside)
    assert tuple(map(int, found.groups())) == expected


@pytest.mark.parametrize("triton", TRITONS)
def test_the_log_names_every_kernel_that_touches_it_in_a_mainloop(triton: str) -> None:
    table = [line.split("|")[1:-1] for line in LOG.read_text().splitlines() if re.match(r"\| \d+ \| `", line)]
    first = 2 + 3 * sorted(TRITONS).index(triton)
    cells = [[cell.strip() for cell in line] for line in table]
    shown = sum(int(cell[0]) for cell in cells if cell[first + 1 : first + 3] != ["-", "-"])
    assert shown == sum(int(row["records"]) for row in rows(triton) if touches(row, "mainloop", "branch"))
