"""Of a class with very many records a look-up reads some alone: a call must not wait for the rest."""

from __future__ import annotations

import sqlite3
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flashgen.core.record import TuningRecord
from flashgen.core.workload import Workload
from flashgen.db import reader
from flashgen.db.layers import Layers
from flashgen.db.reader import MOST_OF_A_CLASS, Reader
from flashgen.db.store import Store
from flashgen.runtime.lookup.ladder import resolve
from flashgen.runtime.lookup.records import Records
from tests.db.samples import CAUSAL, H100, H200, MEASURED, PREDICTED, timed

CLASS = CAUSAL.specialization.workload_class
SHAPES = [CAUSAL.with_shape(seqlen_q=q, seqlen_k=4096) for q in range(1, MOST_OF_A_CLASS + 301)]

pytestmark = pytest.mark.filterwarnings("ignore:.*look-ups use")


def fill(path: Path, *records: TuningRecord, copies: list[Workload]) -> None:
    """Store records, and the first one as that of other workloads, too: row by row, which takes a tenth of the time."""
    with Store.open(path) as store:
        for record in records:
            store.put_record(record)
    names, own = [field.name for field in fields(Workload)], ["key", "specialization"]
    database = sqlite3.connect(path)
    found = database.execute("PRAGMA table_info(records)").fetchall()
    rest = ", ".join(name for _, name, *_ in found if name not in ("id", "workload_id"))
    for workload in copies:
        values = (workload.key, workload.specialization.workload_class, *(getattr(workload, name) for name in names))
        marks = ", ".join("?" * len(values))
        at = database.execute(f"INSERT INTO workloads ({', '.join(own + names)}) VALUES ({marks})", values).lastrowid
        database.execute(f"INSERT INTO records (workload_id, {rest}) SELECT ?, {rest} FROM records WHERE id = 1", (at,))
    database.commit()
    database.close()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with more records of an H100 than a look-up reads, around some of an H200."""
    path = tmp_path_factory.mktemp("crowd") / "tuning.sqlite3"
    slow = replace(timed(MEASURED, 1e4), baselines=())
    predicted = replace(PREDICTED, workload=CAUSAL, predicted_ms=1e4)
    fill(path, replace(slow, device=H100), slow, predicted, copies=SHAPES)
    return path


def test_no_more_rows_are_read_than_the_most(crowd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[object] = []
    original = reader.record_of
    monkeypatch.setattr(reader, "record_of", lambda row, validate: rows.append(row) or original(row, validate))
    with Layers.open([crowd]) as layers:
        records = Records(layers)
        served = [resolve(one, CAUSAL.specialization, H100, records) for one in (SHAPES[-1], SHAPES[-2])]
    assert [each.rung for each in served] == [3, 3]
    assert MOST_OF_A_CLASS <= len(rows) <= MOST_OF_A_CLASS + 200, "with what ships, once"


def test_those_of_the_device_come_first_and_then_the_last_ones_that_were_measured(crowd: Path) -> None:
    of_h200 = [one for one in Reader.open(crowd).of_class(CLASS, H200) if one.device == H200]
    assert {one.provenance for one in of_h200} == {"measured", "predicted"}
    of_h100 = Reader.open(crowd).of_class(CLASS, H100)
    assert {one.device for one in of_h100} == {H100}
    assert {one.workload for one in of_h100} == set(SHAPES[-MOST_OF_A_CLASS:])


def test_it_is_said_and_smaller_classes_are_read_whole_in_silence(crowd: Path, tmp_path: Path) -> None:
    with pytest.warns(match=f"look-ups use {MOST_OF_A_CLASS} records of {CLASS}, which has as many or more"):
        Reader.open(crowd).of_class(CLASS, H200)
    path = tmp_path / "few.sqlite3"
    fill(path, MEASURED, copies=SHAPES[:50])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Reader.open(path).of_class(CLASS, H200) == Reader.open(path).records(arch="sm90", specialization=CLASS)
