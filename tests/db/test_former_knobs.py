"""Revision 0004: knobs of the Hopper families have other names, and old records mean the same kernels."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from flashgen.codegen.families import FAMILIES
from flashgen.db.exchange import import_records
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, H200
from tests.db.schemas import DATA, taken_back

FORMER = {
    "hopper_forward": {"scores_ahead", "maximum", "max_tree"},
    "hopper_backward_fused": {"scores", "pace", "starts"},
    "hopper_backward_split": {"starts"},
}


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """What flashgen of schema 0003 wrote: records and trials of the Hopper families."""
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "knobs_0003.sqlite3", path)
    return path


def knobs_in(path: Path, table: str) -> list[tuple[str, dict[str, object]]]:
    connection = sqlite3.connect(path)
    rows = connection.execute(f"SELECT family, knobs FROM {table} ORDER BY id").fetchall()
    connection.close()
    return [(family, json.loads(knobs)) for family, knobs in rows]


def test_the_file_has_every_knob_under_its_former_name(before: Path) -> None:
    for family, names in FORMER.items():
        rows = [
            knobs for found, knobs in (*knobs_in(before, "records"), *knobs_in(before, "trials")) if found == family
        ]
        assert rows
        assert all(names <= set(knobs) for knobs in rows)


def test_records_and_trials_of_before_mean_the_same_kernels(before: Path) -> None:
    with Store.open(before) as store:
        forward, backward = sorted(store.records(), key=lambda record: record.workload.direction, reverse=True)
        trials = [*store.trials(forward.workload, H200), *store.trials(backward.workload, H200)]
    picked = ("softmax_reference", "max_chains", "qk_prefetch")
    assert [forward.config[name] for name in picked] == ["first_block", 1, "half"]
    picked_back = ("stagger_warpgroups", "qk_prefetch", "accumulator_init")
    assert [backward.config[name] for name in picked_back] == [True, True, "interleaved"]
    assert [[trial.config[name] for name in picked] for trial in trials[:2]] == [
        ["running", 4, "none"],
        ["first_block", 1, "block"],
    ]
    assert [trials[2].config[name] for name in picked_back] == [False, False, "upfront"]
    assert trials[3].config["accumulator_init"] == "interleaved"
    assert len(trials) == 4


def test_an_exported_file_of_before_is_imported(before: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "mine.sqlite3") as store:
        assert import_records(store, before).added == 2
        assert {record.config.family for record in store.records()} == {"hopper_forward", "hopper_backward_fused"}


def test_a_layer_of_before_serves_from_a_copy(before: Path) -> None:
    content = before.read_bytes()
    with Layers.open([before]) as layers:
        (record,) = [found for found, layer in layers.records() if found.workload == CAUSAL and layer == str(before)]
        assert record.config["qk_prefetch"] == "half"
    assert before.read_bytes() == content


def test_knobs_that_are_none_stay_for_the_checks_of_a_row(before: Path) -> None:
    connection = sqlite3.connect(before)
    odd = ['["maximum"]', "{", '{"maximum":["first"]}', '{"maximum":"second"}', "[" * 9999]
    for row, knobs in enumerate(odd, start=1):
        connection.execute("UPDATE OR IGNORE trials SET knobs = ? WHERE id = ?", (knobs, row))
    connection.execute("UPDATE records SET knobs = x'00'")
    connection.commit()
    connection.close()
    with Store.open(before) as store, pytest.warns(UserWarning, match="is ignored"):
        assert store.records() == []


def test_the_former_names_come_back(before: Path) -> None:
    expected = [knobs_in(before, table) for table in ("records", "trials")]
    assert taken_back(before, "0004", "0003")
    assert [knobs_in(before, table) for table in ("records", "trials")] == expected


def test_every_renamed_knob_tells_its_former_name() -> None:
    said = {row.id: {knob.former for knob in row.knobs if knob.former} for row in FAMILIES}
    assert {family: names for family, names in said.items() if names} == FORMER
