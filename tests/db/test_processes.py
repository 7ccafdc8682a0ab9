"""Several real processes on one file: no row is lost but the one in flight, and serving needs little."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.db import connection
from flashgen.db.exchange import export_records
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, H200, MEASURED, SHORT
from tests.tiers import EXHAUSTIVE, first

ROOT = Path(__file__).parents[2]
WRITES = 20
KILLS = int(os.environ.get("KILL_ROUNDS", "2"))
TINY = CAUSAL.with_shape(seqlen_q=16, seqlen_k=16)

WRITER = """
    import sys
    from dataclasses import replace
    from flashgen.core.record import Failure
    from flashgen.db.store import Store
    from tests.db.samples import CAUSAL, H200, MEASURED, TRIAL

    path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Store.open(path) as store:
        for number in range(count):
            workload = CAUSAL.with_shape(batch=number + 1)
            store.put_trial(replace(TRIAL, workload=workload, source=name, outcome=Failure(stage="build", reason=name)))
            store.put_record(replace(MEASURED, workload=workload.with_shape(seqlen_k=len(name))))
            print(number, flush=True)
"""

READER = """
    import sys
    from flashgen.db.layers import Layers
    from tests.db.samples import CAUSAL, H200

    seen = 0
    with Layers.open([__import__("pathlib").Path(sys.argv[1])]) as layers:
        for line in sys.stdin:
            # what ships with flashgen is listed too, and is not what the writers wrote
            found = layers.records(device=H200, specialization=CAUSAL.specialization.workload_class)
            now = sum(layer == layers.first_name for _, layer in found)
            assert now >= seen, (now, seen)
            seen = now
            print(seen, flush=True)
"""

IMPORTER = """
    import sys
    from flashgen.db.exchange import import_records
    from flashgen.db.store import Store

    path, theirs, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for number in range(count):
        with Store.open(path) as store:
            import_records(store, theirs)
"""

CREATOR = """
    import sys, time
    from pathlib import Path
    from flashgen.db.store import Store

    folder, rounds, readers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(rounds):
        while len(list(folder.glob(f"ready-{number}-*"))) < readers:
            time.sleep(0.001)
        Store.open(folder / f"{number}.sqlite3").close()
"""

EARLY_READER = """
    import sys, time, warnings
    from pathlib import Path
    from flashgen.db.layers import Layers
    from tests.db.samples import CAUSAL, H200

    warnings.simplefilter("ignore")  # the others wait for this process, which counts what it had to leave out
    folder, rounds, name, lost = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], []
    for number in range(rounds):
        path = folder / f"{number}.sqlite3"
        (folder / f"ready-{number}-{name}").touch()
        while not path.exists():
            time.sleep(0)
        with Layers.open([path]) as layers:
            layers.record(CAUSAL, H200)
            if layers.layers[0].name != str(path):
                lost.append(number)
    assert not lost, lost
"""

FLEET = """
    # [script, its arguments, its input] of many processes: forks of one that has imported what they need
    import io, json, os, sys, traceback
    import flashgen.db.exchange, flashgen.db.layers, flashgen.db.store, tests.db.samples

    children = []
    for script, arguments, lines in json.loads(sys.argv[1]):
        children.append(os.fork())
        if not children[-1]:
            try:
                sys.argv[1:], sys.stdin, sys.stdout = arguments, io.StringIO(lines), io.StringIO()
                exec(script, {})
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    states = [os.waitpid(child, 0)[1] for child in children]
    user, system, children_user, children_system, _ = os.times()
    assert not any(states), states
    print(user + system + children_user + children_system)
"""

FULL_DISK = """
    import resource, signal, sys
    from dataclasses import replace
    from flashgen.core.errors import DatabaseError
    from flashgen.db.store import Store
    from tests.db.samples import MEASURED, SHORT

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails, as on a full disk
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in sys.argv[2:]:
        path, acknowledged = f"{sys.argv[1]}/{size}.sqlite3", 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), hard))
        try:
            with Store.open(path) as store:
                while acknowledged < 500:
                    store.put_record(replace(MEASURED, workload=SHORT.with_shape(batch=acknowledged + 1)))
                    acknowledged += 1
        except DatabaseError as error:
            assert "disk" in str(error) or "I/O" in str(error), error
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # for what is printed
            print(acknowledged, flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def intact(path: Path) -> bool:
    connection = sqlite3.connect(path)
    answer = connection.execute("PRAGMA integrity_check").fetchall()
    connection.close()
    return answer == [("ok",)]


def test_two_processes_create_and_write_and_one_reads_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    writers = [start(WRITER, path, "x" * length, WRITES) for length in (1, 2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0\n"
    reader = start(READER, path)
    assert reader.stdin is not None
    assert reader.stdout is not None
    seen = []
    while any(writer.poll() is None for writer in writers) or not seen:
        reader.stdin.write("\n")
        reader.stdin.flush()
        seen.append(int(reader.stdout.readline()))
    finish(reader)
    for writer in writers:
        finish(writer)
    assert 0 < seen[0] <= seen[-1] <= 2 * WRITES
    with Store.open(path) as store:
        assert store.counts()["records"] == 2 * WRITES
        # both wrote a trial of the same config for each workload: one row is left of the two
        assert store.counts()["trials"] == WRITES
    assert intact(path)


@pytest.mark.timeout(60 + 20 * KILLS)
def test_a_killed_writer_loses_at_most_the_row_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    for round_ in range(KILLS):
        writer = start(WRITER, path, f"{round_}", 100_000)
        assert writer.stdout is not None
        for _ in range(10 + 7 * (round_ % 10)):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        # not by `communicate`, which does not see lines that came with the last one that was read
        rest = writer.stdout.read().split()
        last = int(rest[-1]) if rest else last
        writer.communicate(timeout=60)
        with Store.open(path, read_only=True) as store:
            trials = [trial for workload in store.workloads() for trial in store.trials(workload, H200)]
        # a trial takes the place of an earlier round's: what has this writer's name is what it wrote
        found = {trial.workload.batch for trial in trials if trial.source == f"{round_}"}
        assert found in (set(range(1, last + 2)), set(range(1, last + 3)))
    assert intact(path)
    with Store.open(path) as store:
        store.put_record(MEASURED)
        assert store.record(CAUSAL, H200) == MEASURED


def test_writers_importers_and_readers_at_once_lose_nothing(tmp_path: Path) -> None:
    path, writes, imported = tmp_path / "tuning.sqlite3", 8, 6
    Store.open(path).close()  # what has no tables yet is no database to a reader
    everyone = [(WRITER, [path, "x" * length, writes], "") for length in range(1, 5)]
    for number in range(1, 5):
        theirs = [replace(MEASURED, workload=TINY.with_shape(batch=1000 * number + at)) for at in range(imported)]
        export_records(theirs, tmp_path / f"{number}.sqlite3")
        everyone.append((IMPORTER, [path, tmp_path / f"{number}.sqlite3", 2], ""))
    everyone += [(READER, [path], "\n" * 4)] * 8
    fleet = [(textwrap.dedent(script), list(map(str, arguments)), lines) for script, arguments, lines in everyone]
    seconds = float(finish(start(FLEET, json.dumps(fleet))))
    assert seconds < 15, "of processor time; it takes 3"
    with Store.open(path) as store:
        found = {record.workload.key for record in store.records(device=H200)}
        assert store.counts()["trials"] == writes
        trials = {trial.workload.batch for workload in store.workloads() for trial in store.trials(workload, H200)}
    written = {CAUSAL.with_shape(batch=at + 1, seqlen_k=n).key for n in range(1, 5) for at in range(writes)}
    theirs_too = {TINY.with_shape(batch=1000 * n + at).key for n in range(1, 5) for at in range(imported)}
    assert found == written | theirs_too
    assert trials == set(range(1, writes + 1))
    assert intact(path)


@pytest.mark.parametrize("rounds", first(1, [10, 40]))
def test_who_opens_a_file_at_the_moment_it_is_made_keeps_it(tmp_path: Path, rounds: int) -> None:
    readers = 3
    everyone = [(CREATOR, [tmp_path, rounds, readers], "")] * 2
    everyone += [(EARLY_READER, [tmp_path, rounds, name], "") for name in range(readers)]
    fleet = [(textwrap.dedent(script), list(map(str, arguments)), lines) for script, arguments, lines in everyone]
    finish(start(FLEET, json.dumps(fleet)))
    assert all(intact(tmp_path / f"{number}.sqlite3") for number in range(rounds))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_lock_that_does_not_go_away_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, begun = tmp_path / "t.sqlite3", []
    Store.open(path).close()

    def begin(own: sqlite3.Connection) -> None:
        begun.append(own)
        own.execute("BEGIN IMMEDIATE")

    monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match=r"t\.sqlite3: database is locked"):
            connection.use(path, "write", begin)
        assert len(begun) == 1
        with pytest.raises(DatabaseError, match=r"t\.sqlite3: database is locked"):
            Store.open(path)
        assert Store.open(path, read_only=True).records() == []


def test_a_file_that_somebody_rewrites_is_not_read_as_one_that_nobody_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rollback journal there is no -wal that would tell; half of the pages may be new."""
    path = tmp_path / "t.sqlite3"
    Store.open(path).close()
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseError, match=r"t\.sqlite3: database is locked"):
            connection.use(path, "read", lambda own: own.execute("SELECT count(*) FROM records").fetchone())
        other.execute("ROLLBACK")
        assert connection.use(path, "read", lambda own: own.execute("SELECT count(*) FROM records").fetchone()) == (0,)


def test_a_lock_that_is_refused_at_once_is_tried_again(tmp_path: Path) -> None:
    refusals = [sqlite3.OperationalError("database is locked") for _ in range(3)]

    def attempt() -> str:
        if refusals:
            raise refusals.pop()
        return "done"

    assert connection.retry(tmp_path, attempt) == "done"


def test_a_full_disk_loses_no_acknowledged_record(tmp_path: Path) -> None:
    sizes = (0, 4096, 65_536, 250_000, 400_000, 700_000, 1_000_000)
    out = finish(start(FULL_DISK, tmp_path, *sizes)).split()
    acknowledged = [int(number) for number in out]
    assert len(acknowledged) == len(sizes), "each ends in an error of the database"
    assert acknowledged == sorted(acknowledged)
    assert acknowledged[0] == 0 < acknowledged[-1]
    for size, count in zip(sizes, acknowledged, strict=True):
        path = tmp_path / f"{size}.sqlite3"
        with Store.open(path) as store:
            batches = {record.workload.batch for record in store.records()}
            assert batches in (set(range(1, count + 1)), set(range(1, count + 2))), size
            store.put_record(replace(MEASURED, workload=SHORT.with_shape(batch=600)))
            assert len(store.records()) == len(batches) + 1
        assert intact(path)


@EXHAUSTIVE
def test_a_look_up_loads_no_migration_search_or_terminal_code(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
    script = """
        import sys
        from pathlib import Path
        from flashgen.db.layers import Layers
        from tests.db.samples import CAUSAL, H200

        with Layers.open([Path(sys.argv[1])]) as layers:
            found = layers.record(CAUSAL, H200)
            # a shipped record may answer too: its file must need no migration either
            print(found is not None and found[1] == layers.first_name)
            layers.writable  # an up-to-date file needs no migration, and a new one none either
        heavy = {"alembic", "optuna", "typer", "triton"} & set(sys.modules)
        assert not heavy, heavy
    """
    assert finish(start(script, path)) == "True\n"
    assert finish(start(script, tmp_path / "new.sqlite3")) == "False\n"
    assert (tmp_path / "new.sqlite3").is_file()
