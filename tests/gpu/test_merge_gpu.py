"""`flashgen db merge` on a GPU: both sides' configs are timed again before one of them wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.launch.gpu import current_device
from tests.gpu.command import run

pytestmark = pytest.mark.gpu

KEY = "b2-h8-hk2-s4096-d128-causal"


def test_a_merge_races_both_sides_and_keeps_what_lost(tmp_path: Path) -> None:
    first, second, both = (tmp_path / f"{name}.sqlite3" for name in ("portable", "hopper", "both"))
    for path, family in ((first, "portable_forward"), (second, "hopper_forward")):
        quick = ("--budget", "4", "--finals-rounds", "3", "--finals-window", "0.05")
        done = run("tune", "--shape", KEY, "--family", family, *quick, "--db", str(path))
        assert done.returncode == 0, done.stderr
    merged = run("db", "merge", str(first), str(second), "-o", str(both), "--json")
    assert merged.returncode == 0, merged.stderr
    (pair,) = json.loads(merged.stdout)
    assert pair["verdict"] == "second", pair
    with Store.open(both, read_only=True) as store:
        record = store.record(Workload.parse(KEY), current_device())
    assert record is not None
    assert record.config.family == "hopper_forward"
    with Store.open(second, read_only=True) as store:
        before = store.record(Workload.parse(KEY), current_device())
    assert before is not None
    assert record.created > before.created, "the time of the race, not the old one"
    past = run("db", "history", KEY, "--json", FLASHGEN_DB=str(both))
    assert past.returncode == 0, past.stderr
    assert "portable_forward" in past.stdout
