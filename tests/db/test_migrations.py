"""Old files stay readable, a new file equals a migrated one, and reading never changes a file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from flashgen.codegen.families import FAMILIES
from flashgen.core.config import Config
from flashgen.core.errors import DatabaseError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.history import UNKNOWN, Origin
from flashgen.core.record import Limits, Trial, TuningRecord
from flashgen.core.settings import child_environment, settings
from flashgen.core.workload import Workload
from flashgen.db import files
from flashgen.db.exchange import import_records
from flashgen.db.layers import Layers
from flashgen.db.layout import SCHEMA_VERSION, TABLES
from flashgen.db.past import past_of
from flashgen.db.schema import Base
from flashgen.db.store import Store
from tests.db.samples import (
    CAUSAL,
    DECODE_STEP,
    FAILED,
    FINALISTS,
    FIRST_KNOBS,
    H200,
    HARD_TIMES,
    MEASURED,
    ORIGIN,
    PREDICTED,
    REPLACED,
    SEARCH,
    TRIAL,
    hard,
    on_profiles,
    timed,
)

DATA = Path(__file__).parent / "data"
OLD_FILES = sorted(DATA.glob("schema_*.sqlite3"))

V = TypeVar("V", TuningRecord, Trial)

LATER_THAN_0006 = {"page_ids", "split_keys"}
"""Knobs of the portable forward family."""


def structure(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(kind, name, "".join((sql or "").split())) for kind, name, sql in rows}


def migrated(path: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        files.migrate(connection)
    return engine


def test_the_newest_revision_is_the_schema_version() -> None:
    scripts = ScriptDirectory(str(files.MIGRATIONS))
    assert scripts.get_heads() == [SCHEMA_VERSION]
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions == [f"{number:04d}" for number in range(int(SCHEMA_VERSION), 0, -1)]
    assert [path.stem for path in OLD_FILES] == sorted(f"schema_{revision}" for revision in revisions)


def test_readers_and_the_schema_name_the_same_tables() -> None:
    assert set(Base.metadata.tables) == TABLES


def test_a_new_file_equals_a_migrated_one(tmp_path: Path) -> None:
    migrated(tmp_path / "migrated.sqlite3").dispose()
    Store.open(tmp_path / "new.sqlite3").close()
    new, old = (sqlite3.connect(tmp_path / f"{name}.sqlite3") for name in ("new", "migrated"))
    assert structure(new) == structure(old)
    new.close()
    old.close()


def test_the_tables_equal_the_migrated_schema(tmp_path: Path) -> None:
    engine = migrated(tmp_path / "migrated.sqlite3")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


@pytest.mark.parametrize("old", OLD_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_the_file_of_every_schema_version_still_opens(old: Path, how: dict[str, bool], tmp_path: Path) -> None:
    path = tmp_path / old.name
    shutil.copyfile(old, path)
    # the knobs that a family declares may change; this is about the tables
    with Store.open(path, **how, validate=first_knobs) as store:
        assert store.records() == [with_first_knobs(record) for record in (MEASURED, PREDICTED)]
        assert store.trials(CAUSAL, H200) == [with_first_knobs(trial) for trial in (TRIAL, FAILED)]
    if how:
        assert path.read_bytes() == old.read_bytes()


def first_knobs(config: Config) -> Config:
    return Config.of(config.family, {name: value for name, value in config.knobs if name in FIRST_KNOBS})


def with_first_knobs(value: V) -> V:
    return replace(value, config=first_knobs(value.config))


# --- 0002: bias and mask are kinds ----------------------------------------------------------------------------------


@pytest.fixture
def yes_and_no(tmp_path: Path) -> Path:
    """A file of schema 0001 whose only workload has a bias and a mask."""
    path = tmp_path / "yes_and_no.sqlite3"
    shutil.copyfile(DATA / "schema_0001.sqlite3", path)
    workload = replace(CAUSAL, bias="full", mask="full")
    connection = sqlite3.connect(path)
    names = (workload.key, workload.specialization.workload_class)
    connection.execute("UPDATE workloads SET bias = 1, mask = 1, key = ?, specialization = ?", names)
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_a_bias_that_was_there_or_not_has_a_value_for_every_pair(yes_and_no: Path, how: dict[str, bool]) -> None:
    with Store.open(yes_and_no, **how) as store:
        assert store.workloads() == [replace(CAUSAL, bias="full", mask="full")]
        assert [record.provenance for record in store.records()] == ["measured", "predicted"]
        assert len(store.records()[0].baselines) == 2


def test_what_was_no_yes_or_no_stays_for_the_checks_of_a_row(yes_and_no: Path) -> None:
    connection = sqlite3.connect(yes_and_no)
    connection.execute("UPDATE workloads SET bias = 7, mask = x'00'")
    connection.commit()
    connection.close()
    with Store.open(yes_and_no) as store, pytest.warns(UserWarning, match="is ignored"):
        assert store.records() == []


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE workloads",
        "ALTER TABLE workloads DROP COLUMN mask",
        "ALTER TABLE workloads RENAME TO work",
    ],
)
def test_an_older_file_without_its_tables_is_refused_by_name(yes_and_no: Path, statement: str) -> None:
    connection = sqlite3.connect(yes_and_no)
    connection.execute(statement)
    connection.commit()
    connection.close()
    with pytest.raises(DatabaseError, match="yes_and_no"):
        Store.open(yes_and_no)
    with pytest.warns(UserWarning, match=r"yes_and_no.sqlite3 is not used"), Layers.open([yes_and_no]) as layers:
        assert str(yes_and_no) not in [layer.name for layer in layers.layers]


def test_rows_that_point_nowhere_do_not_stop_a_migration(yes_and_no: Path) -> None:
    connection = sqlite3.connect(yes_and_no)
    connection.execute("UPDATE records SET workload_id = 999 WHERE provenance = 'predicted'")
    connection.commit()
    connection.close()
    with Store.open(yes_and_no) as store, pytest.warns(UserWarning, match="point to its workload"):
        assert [record.provenance for record in store.records()] == ["measured"]


def test_a_migration_can_be_taken_back(yes_and_no: Path) -> None:
    before = contents(yes_and_no)
    assert taken_back(yes_and_no, "0002", "0001") == before


def contents(path: Path) -> tuple[set[tuple[str, str, str]], list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    found = structure(connection), connection.execute("SELECT * FROM workloads").fetchall()
    connection.close()
    return found


def taken_back(path: Path, upgrade: str, downgrade: str) -> tuple[set[tuple[str, str, str]], list[tuple[object, ...]]]:
    """What a file holds after going up one revision and down again."""
    engine = sa.create_engine(f"sqlite:///{path}")
    config = AlembicConfig()
    config.set_main_option("script_location", str(files.MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, upgrade)
        command.downgrade(config, downgrade)
    engine.dispose()
    return contents(path)


# --- 0003: a workload may ask for the same bits every time -----------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_what_was_stored_before_never_asked_for_determinism(tmp_path: Path, how: dict[str, bool]) -> None:
    path = tmp_path / "forward.sqlite3"
    shutil.copyfile(DATA / "schema_0002.sqlite3", path)
    with Store.open(path, **how) as store:
        assert [workload.deterministic for workload in store.workloads()] == [False]
    if not how:
        connection = sqlite3.connect(path)
        assert connection.execute("SELECT deterministic FROM workloads").fetchall() == [(0,)]
        connection.close()


def test_determinism_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "forward.sqlite3"
    shutil.copyfile(DATA / "schema_0002.sqlite3", path)
    before = contents(path)
    assert taken_back(path, "0003", "0002") == before


# --- 0004: knobs of the Hopper families have other names ------------------------------------------------------------

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


# --- 0005: a record has times on hard data --------------------------------------------------------------------------


def test_what_was_measured_before_has_no_times_on_hard_data(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0004.sqlite3", path)
    with Store.open(path) as store:
        (record, _) = store.records()
        assert (record, record.hard_ms) == (MEASURED, None)
        store.put_record(hard(MEASURED, *HARD_TIMES))
        assert store.record(CAUSAL, H200) == hard(MEASURED, *HARD_TIMES)


def test_times_on_hard_data_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0004.sqlite3", path)
    before = contents(path)
    assert taken_back(path, "0005", "0004") == before


# --- 0006: a record has an origin, and what was replaced is kept ----------------------------------------------------


def test_what_was_stored_before_has_no_history_and_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0005.sqlite3", path)
    with Store.open(path) as store:
        assert [origin for _, origin in store.past(CAUSAL).records] == [UNKNOWN, UNKNOWN]
        store.put_record(timed(MEASURED, 1.1), ORIGIN)
        past = store.past(CAUSAL)
    assert [origin for _, origin in past.records] == [ORIGIN, UNKNOWN]
    (last,) = past.replaced
    assert (with_first_knobs(last.record), last.origin) == (with_first_knobs(MEASURED), UNKNOWN)


@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_a_stored_history_is_read(tmp_path: Path, how: dict[str, bool]) -> None:
    path = tmp_path / "now.sqlite3"
    shutil.copyfile(DATA / "schema_0006.sqlite3", path)
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


def test_a_history_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0005.sqlite3", path)
    before = contents(path)
    assert taken_back(path, "0006", "0005") == before


def test_an_older_file_with_a_table_of_that_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0005.sqlite3", path)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE history (id, reason)")
    connection.commit()
    connection.close()
    for how in ({}, {"read_only": True}):
        with pytest.raises(DatabaseError, match=r"before\.sqlite3"):
            Store.open(path, **how)


def test_a_migration_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """The process dies with the new column made and the transaction open; the next one migrates."""
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0004.sqlite3", path)
    script = textwrap.dedent("""
        import os, sys
        from alembic import op
        from flashgen.db.store import Store
        add_column = op.add_column
        op.add_column = lambda *arguments: (add_column(*arguments), os._exit(9))
        Store.open(sys.argv[1])
        """)
    command = [sys.executable, "-c", script, str(path)]
    died = subprocess.run(command, env=child_environment(PYTHONPATH=os.getcwd()), check=False)
    assert died.returncode == 9
    assert version_in(path) == "0004"
    with Store.open(path) as store:
        assert store.records() == [MEASURED, PREDICTED]
        assert store.trials(CAUSAL, H200) == [TRIAL, FAILED]
    assert version_in(path) == SCHEMA_VERSION


# --- a schema version that does not exist yet ---------------------------------------------------------------------


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A flashgen whose schema is one revision newer: `records` has a column more."""
    scripts = tmp_path / "migrations"
    shutil.copytree(files.MIGRATIONS, scripts)
    version = f"{int(SCHEMA_VERSION) + 1:04d}"
    text = f'''
        """One column more. Reason: a test."""

        import sqlalchemy as sa
        from alembic import op

        revision = "{version}"
        down_revision = "{SCHEMA_VERSION}"


        def upgrade():
            with op.batch_alter_table("records") as table:
                table.add_column(sa.Column("rating", sa.Integer(), nullable=True))
        '''
    (scripts / "versions" / f"v{version}_rating.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(files, "MIGRATIONS", scripts)
    monkeypatch.setattr(files, "SCHEMA_VERSION", version)
    return version


@pytest.fixture
def older(tmp_path: Path) -> Path:
    path = tmp_path / "older.sqlite3"
    shutil.copyfile(DATA / f"schema_{SCHEMA_VERSION}.sqlite3", path)
    return path


def version_in(path: Path) -> str:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    connection.close()
    return version


def test_an_older_file_is_migrated_in_place_when_it_may_be_written(next_version: str, older: Path) -> None:
    with Store.open(older) as store:
        assert store.records() == [MEASURED, PREDICTED]
    assert version_in(older) == next_version


@pytest.mark.parametrize("how", [{"read_only": True}, {"shipped": True}], ids=["read", "shipped"])
def test_an_older_layer_is_migrated_in_a_copy_made_once(next_version: str, older: Path, how: dict[str, bool]) -> None:
    before = older.read_bytes()
    for _ in range(2):
        with Store.open(older, **how) as store:
            assert store.records() == [MEASURED, PREDICTED]
        (copy,) = (settings().cache_dir / "databases").iterdir()
        assert version_in(copy) == next_version
    assert older.read_bytes() == before


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_copy_is_of_this_user_alone_whatever_the_umask(next_version: str, older: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Store.open(older, read_only=True).close()
        (copy,) = (settings().cache_dir / "databases").iterdir()
        made = copy.stat()
        Store.open(older, read_only=True).close()
    finally:
        os.umask(before)
    assert (copy.stat().st_ino, copy.stat().st_mode & 0o777) == (made.st_ino, 0o600), "it is made once"
    assert copy.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("plant", ["link", "open", "fifo"])
def test_a_planted_copy_is_not_read(next_version: str, older: Path, tmp_path: Path, plant: str) -> None:
    Store.open(older, read_only=True).close()
    (copy,) = (settings().cache_dir / "databases").iterdir()
    planted = tmp_path / "planted.sqlite3"
    Store.open(planted).close()
    copy.unlink()
    if plant == "link":
        copy.symlink_to(planted)
    elif plant == "fifo":
        os.mkfifo(copy)
    else:
        shutil.copyfile(planted, copy)
        copy.chmod(0o666)
    with Store.open(older, read_only=True) as store:
        assert store.records() == [MEASURED, PREDICTED]
    assert not copy.is_symlink()
    assert copy.stat().st_mode & 0o777 == 0o600


def test_copies_that_were_not_finished_are_deleted(next_version: str, older: Path) -> None:
    folder = settings().cache_dir / "databases"
    for name in ("killed.tmp", "busy.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.sqlite3").write_bytes(b"half")
    then = time.time() - 2 * ABANDONED_SECONDS
    os.utime(folder / "killed.tmp", (then, then))
    Store.open(older, read_only=True).close()
    assert sorted(path.suffix for path in folder.iterdir()) == [".sqlite3", ".tmp"]
    assert (folder / "busy.tmp" / "half.sqlite3").exists()


def test_an_older_layer_serves(next_version: str, older: Path, tmp_path: Path) -> None:
    with Layers.open([older]) as layers:
        assert layers.record(CAUSAL, H200) == (MEASURED, str(older))


def test_a_failed_migration_leaves_the_file_as_it_was(next_version: str, older: Path) -> None:
    script = files.MIGRATIONS / "versions" / f"v{next_version}_rating.py"
    script.write_text(script.read_text() + "    raise RuntimeError('power cut')\n")
    before = sqlite3.connect(older)
    expected = structure(before)
    before.close()
    with pytest.raises(RuntimeError, match="power cut"):
        Store.open(older)
    after = sqlite3.connect(older)
    assert structure(after) == expected
    after.close()
    assert version_in(older) == SCHEMA_VERSION


# --- 0007: a workload has a profile of lengths, and a measurement times on several of them --------------------------


def test_what_was_measured_before_is_a_pass_without_lengths(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0006.sqlite3", path)
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


def test_profiles_of_lengths_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0006.sqlite3", path)
    before = contents(path)
    assert taken_back(path, "0007", "0006") == before


# --- 0008: a workload of packed sequences has the rows of all of them ------------------------------------------------


def test_packed_sequences_without_rows_are_as_long_as_they_can_be(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0007.sqlite3", path)
    before = contents(path)
    full, part = (Workload.parse(f"b16-h12-{rows}s1024-d64-causal-varlen") for rows in ("", "tq9000-"))
    with Store.open(path) as store:
        known = [record.workload for record in store.records()]
        assert known
        assert all(workload.total_q is None for workload in known)
        for workload in (full, part):
            store.put_record(replace(MEASURED, workload=workload, baselines=()))
        assert store.record(part, H200) == replace(MEASURED, workload=part, baselines=())
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE workloads SET total_q = NULL, total_k = NULL WHERE key = ?", [full.key])
    with Store.open(path) as store:
        assert {record.workload for record in store.records()} == {*known, full, part}
    shutil.copyfile(DATA / "schema_0007.sqlite3", path)
    assert taken_back(path, "0008", "0007") == before


# --- 0009: a trial knows its search, and searches are kept -----------------------------------------------------------


def test_searches_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0008.sqlite3", path)
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
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0009.sqlite3", path)
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
    path = tmp_path / "slice.sqlite3"
    shutil.copyfile(DATA / "schema_0009.sqlite3", path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE devices SET name = 'NVIDIA H200 MIG 7g.141gb' WHERE identity = ?", (H200.identity,))
    slice_ = replace(H200, name="NVIDIA H200 MIG 7g.141gb")
    with Store.open(path) as store:
        assert slice_.identity == f"{H200.identity}-mig"
        record = store.record(CAUSAL, slice_)
        assert record is not None
        assert record.device.identity == slice_.identity
        assert store.record(CAUSAL, H200) is None
