"""Several real processes on one file: no row is lost but the one in flight, and serving needs little."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

from flashgen.db.store import Store
from tests.db.samples import CAUSAL, H200, MEASURED

ROOT = Path(__file__).parents[2]
WRITES = 40

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
            now = sum(layer == layers.first_name for _, layer in layers.records(device=H200))
            assert now >= seen, (now, seen)
            seen = now
            print(seen, flush=True)
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


def test_a_killed_writer_loses_at_most_the_row_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    for round_ in range(3):
        writer = start(WRITER, path, f"{round_}", 100_000)
        assert writer.stdout is not None
        for _ in range(10 + 7 * round_):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate(timeout=60)[0].split()
        last = int(rest[-1]) if rest else last
        with Store.open(path, read_only=True) as store:
            found = {workload.batch for workload in store.workloads() if store.trials(workload, H200)}
        assert set(range(1, last + 2)) <= found
        assert len(found) <= last + 2 + round_ * 100_000
    assert intact(path)
    with Store.open(path) as store:
        store.put_record(MEASURED)
        assert store.record(CAUSAL, H200) == MEASURED


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
