"""What revisions add, other than 0002 and 0004: old files have no value of it, and it can be taken back."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.config import Config
from flashgen.core.errors import DatabaseError
from flashgen.core.history import UNKNOWN, Origin
from flashgen.core.record import Limits
from flashgen.core.workload import Workload
from flashgen.db.past import past_of
from flashgen.db.store import Store
from tests.db.samples import (
    CAUSAL,
    DECODE_STEP,
    FAILED,
    FINALISTS,
    H200,
    HARD_TIMES,
    MEASURED,
    ORIGIN,
    REPLACED,
    SEARCH,
    TRIAL,
    hard,
    on_profiles,
    timed,
)
from tests.db.schemas import contents, copy_of, execute, taken_back, with_first_knobs

LATER_THAN_0006 = {"page_ids", "split_keys"}
"""Knobs of the portable forward family."""


@pytest.mark.parametrize(
    ("before", "revision"), [("0002", "0003"), ("0004", "0005"), ("0005", "0006"), ("0006", "0007")]
)
def test_a_revision_can_be_taken_back(tmp_path: Path, before: str, revision: str) -> None:
    path = copy_of(before, tmp_path)
    held = contents(path)
    assert taken_back(path, revision, before) == held


# --- 0003: a workload may ask for the same bits every time -----------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_what_was_stored_before_never_asked_for_determinism(tmp_path: Path, how: dict[str, bool]) -> None:
    path = copy_of("0002", tmp_path)
    with Store.open(path, **how) as store:
        assert [workload.deterministic for workload in store.workloads()] == [False]
    if not how:
        connection = sqlite3.connect(path)
        assert connection.execute("SELECT deterministic FROM workloads").fetchall() == [(0,)]
        connection.close()


# --- 0005: a record has times on hard data --------------------------------------------------------------------------


def test_what_was_measured_before_has_no_times_on_hard_data(tmp_path: Path) -> None:
    path = copy_of("0004", tmp_path)
    with Store.open(path) as store:
        (record, _) = store.records()
        assert (record, record.hard_ms) == (MEASURED, None)
        store.put_record(hard(MEASURED, *HARD_TIMES))
        assert store.record(CAUSAL, H200) == hard(MEASURED, *HARD_TIMES)


# --- 0006: a record has an origin, and what was replaced is kept ----------------------------------------------------


def test_what_was_stored_before_has_no_history_and_gets_one(tmp_path: Path) -> None:
    path = copy_of("0005", tmp_path)
    with Store.open(path) as store:
        assert [origin for _, origin in store.past(CAUSAL).records] == [UNKNOWN, UNKNOWN]
        store.put_record(timed(MEASURED, 1.1), ORIGIN)
        past = store.past(CAUSAL)
    assert [origin for _, origin in past.records] == [ORIGIN, UNKNOWN]
    (last,) = past.replaced
    assert (with_first_knobs(last.record), last.origin) == (with_first_knobs(MEASURED), UNKNOWN)


@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_a_stored_history_is_read(tmp_path: Path, how: dict[str, bool]) -> None:
    path = copy_of("0006", tmp_path)
    with Store.open(path, **how) as store:
        past = store.past(CAUSAL, H200)
    stored = with_knobs_of_0006(ORIGIN)
    assert [origin for _, origin in past.records] == [stored, UNKNOWN]
    record = replace(REPLACED.record, config=knobs_of_0006(REPLACED.record.config))
    assert past.replaced == (replace(REPLACED, record=record, origin=with_knobs_of_0006(REPLACED.origin)),)


def knobs_of_0006(config: Config) -> Config:
    """A config of the past is read as it was stored, without the knobs that its family got since."""
    return Config.of(config.family, {name: value for name, value in config.knobs if name not in LATER_THAN_0006})


def with_knobs_of_0006(origin: Origin) -> Origin:
    rivals = tuple(replace(rival, config=knobs_of_0006(rival.config)) for rival in origin.runners_up)
    return replace(origin, runners_up=rivals)


def test_an_older_file_with_a_table_of_that_name_is_refused(tmp_path: Path) -> None:
    path = copy_of("0005", tmp_path)
    execute(path, "CREATE TABLE history (id, reason)")
    for how in ({}, {"read_only": True}):
        with pytest.raises(DatabaseError, match=r"before\.sqlite3"):
            Store.open(path, **how)


# --- 0007: a workload has a profile of lengths, and a measurement times on several of them --------------------------


def test_what_was_measured_before_is_a_pass_without_lengths(tmp_path: Path) -> None:
    path = copy_of("0006", tmp_path)
    with Store.open(path) as store:
        assert [(record.workload.lengths, record.workload) for record in store.records()] == [("", CAUSAL)] * 2
        step, same = on_profiles(MEASURED), replace(DECODE_STEP, lengths="same")
        store.put_record(step)
        store.put_record(replace(MEASURED, workload=same, baselines=()))
        trial = replace(TRIAL, workload=DECODE_STEP, outcome=step.measurement)
        store.put_trial(trial)
        assert store.record(DECODE_STEP, H200) == step
        assert [found.outcome for found in store.trials(DECODE_STEP, H200)] == [step.measurement]
        assert len(store.records(specialization="dec-bf16-d128-page16")) == 2
        store.put_record(timed(step, 1.1, 1.2, 1.3))
        assert [each.record for each in store.past(DECODE_STEP).replaced] == [step]


# --- 0008: a workload of packed sequences has the rows of all of them ------------------------------------------------


def test_packed_sequences_without_rows_are_as_long_as_they_can_be(tmp_path: Path) -> None:
    path = copy_of("0007", tmp_path)
    before = contents(path)
    full, part = (Workload.parse(f"b16-h12-{rows}s1024-d64-causal-varlen") for rows in ("", "tq9000-"))
    with Store.open(path) as store:
        known = [record.workload for record in store.records()]
        assert known
        assert all(workload.total_q is None for workload in known)
        for workload in (full, part):
            store.put_record(replace(MEASURED, workload=workload, baselines=()))
        assert store.record(part, H200) == replace(MEASURED, workload=part, baselines=())
    execute(path, "UPDATE workloads SET total_q = NULL, total_k = NULL WHERE key = ?", full.key)
    with Store.open(path) as store:
        assert {record.workload for record in store.records()} == {*known, full, part}
    copy_of("0007", tmp_path)
    assert taken_back(path, "0008", "0007") == before


# --- 0009: a trial knows its search, and searches are kept -----------------------------------------------------------


def test_searches_can_be_taken_back(tmp_path: Path) -> None:
    path = copy_of("0008", tmp_path)
    before = contents(path)
    with Store.open(path) as store:
        for run in ("one", "other"):
            store.put_trial(replace(TRIAL, source=run, run=run))
        store.put_search(SEARCH)
        store.put_finalists(FINALISTS)
    assert taken_back(path, "0009", "0008") == before
    with Store.open(path) as store:  # of two trials of a config the last one stays
        assert [trial.source for trial in store.trials(CAUSAL, H200)] == [TRIAL.source, FAILED.source, "other"]


# --- 0010: a record has confidence and limits, and a device the power it is sold with ---------------------------------


def test_limits_can_be_taken_back(tmp_path: Path) -> None:
    path = copy_of("0009", tmp_path)
    before = contents(path)
    assert taken_back(path, "0010", "0009") == before
    with Store.open(path) as store:
        known = store.record(CAUSAL, H200)
        assert known is not None
        assert known.limits == Limits()
        assert known.measurement is not None
        assert known.measurement.confidence is None
        limits = Limits(power_limit_w=600.0, max_sm_clock_mhz=1785.0)
        sure = replace(known, measurement=replace(known.measurement, confidence=0.97), limits=limits)
        store.put_record(sure)
        assert store.record(CAUSAL, H200) == sure
        store.put_record(known)
    with Store.open(path) as store:
        assert past_of(store.reader, CAUSAL).replaced[0].record == sure


def test_a_slice_of_a_card_keeps_its_records_under_a_name_of_its_own(tmp_path: Path) -> None:
    path = copy_of("0009", tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE devices SET name = 'NVIDIA H200 MIG 7g.141gb' WHERE identity = ?", (H200.identity,))
    slice_ = replace(H200, name="NVIDIA H200 MIG 7g.141gb")
    with Store.open(path) as store:
        assert slice_.identity == f"{H200.identity}-mig"
        record = store.record(CAUSAL, slice_)
        assert record is not None
        assert record.device.identity == slice_.identity
        assert store.record(CAUSAL, H200) is None
