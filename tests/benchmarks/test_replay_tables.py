"""Replay tables: which configs they have, that a stopped run goes on, and what is written and read again."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import replay_tables
from benchmarks.exit_codes import STOPPED
from benchmarks.replay_plan import EVERY, MATRIX, SAMPLE, WHOLE, of_winners, searched, spread
from benchmarks.replay_tables import Tables
from flashgen.core.device import find_device
from flashgen.core.errors import DatabaseError
from flashgen.core.record import Failure, Measurement
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.db.log_files import MAX_BYTES, read_log, write_log
from flashgen.db.store import Store
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.lattice import Lattice
from tests.db.samples import FINALISTS, KNOWN_TRIAL, MEASURED, SEARCH
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200, Clock, FakeCompiler, FakeExecutor

BACKWARD = Workload.parse("bwd-b4-h16-s1024-d128")
FORWARD = Workload.parse("b4-h16-s1024-d256")
KNOWN = Workload.parse("b8-h32-s2048-d64-causal")
"""Which an H200 has a record of."""

H100 = find_device("h100")
FAMILIES = ("hopper_backward_fused", "hopper_backward_split")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "replays.sqlite3") as opened:
        yield opened


def tables(store: Store, executor: FakeExecutor, said: list[str] | None = None) -> Tables:
    return Tables(
        store=store,
        executor=executor,
        compiler=FakeCompiler(),
        race=4,
        say=(said if said is not None else []).append,
        clock=executor.clock,
    )


def test_a_run_that_was_stopped_goes_on_and_races_at_its_end(store: Store, tmp_path: Path) -> None:
    plan = searched(BACKWARD, H200, families=FAMILIES)
    assert (plan.kind, len(plan.starts), plan.candidates) == (EVERY, 40, 40)
    assert plan.starts[0] == (Candidates.of(BACKWARD, H200, FAMILIES).default, "default")
    executor = FakeExecutor(clock=Clock(), evaluate_s=1.0)
    said: list[str] = []
    assert not tables(store, executor, said).collect([plan], until=10.0)
    assert len(store.trials(BACKWARD, H200)) < 20
    assert "stopped" in said[-1]
    assert not executor.races
    before = len(executor.evaluated)
    assert tables(store, executor).collect([plan], until=1e6)
    assert tables(store, executor).collect([plan], until=1e6), "nothing is left"
    assert len(executor.evaluated) == len(set(executor.evaluated)) > before
    assert len(executor.races) == 1
    (path,) = tables(store, executor).packed([BACKWARD], tmp_path)
    assert path.name == f"{BACKWARD.key}.jsonl.gz"
    log = read_log(path)
    assert log.search is not None
    assert {"kind": EVERY, "configs": 40}.items() <= dict(log.search.settings).items()
    assert {trial.config for trial in log.trials} == {config for config, _ in plan.starts}
    assert [trial.number for trial in log.trials] == list(range(1, 41))
    assert len(log.finalists) == 4
    assert all(trial.compiled is not None for trial in log.trials if not isinstance(trial.outcome, Failure))


def test_each_workload_has_its_share_of_the_time_and_then_what_is_left(store: Store) -> None:
    plans = [searched(FORWARD, H200, families=("hopper_forward",)), searched(BACKWARD, H200, families=FAMILIES)]
    executor = FakeExecutor(clock=Clock(), evaluate_s=1.0)
    assert not tables(store, executor).collect(plans, until=60.0)
    counts = [sum(workload == plan.workload for workload, _ in executor.evaluated) for plan in plans]
    assert sum(counts) >= 55
    assert min(counts) >= 25


def test_a_sample_has_the_lists_first_and_a_matrix_the_winners() -> None:
    families = ("hopper_forward",)
    default = Candidates.of(FORWARD, H200, families).default
    others = [config for config in Candidates.of(FORWARD, H200, families).spaces[0].configs if config != default]
    near = MEASURED.workload.with_shape(seqlen_q=512, seqlen_k=512)
    records = [
        replace(MEASURED, workload=FORWARD.with_shape(seqlen_q=rows, seqlen_k=rows), config=others[number])
        for number, rows in enumerate((512, 2048))
    ]
    plan = searched(FORWARD, H200, families=families, configs=20, records=records)
    assert (plan.kind, len(plan.starts)) == (SAMPLE, 20)
    assert list(dict.fromkeys(source for _, source in plan.starts)) == ["default", "neighbour", "seed", "random"]
    assert plan == searched(FORWARD, H200, families=families, configs=20, records=records)
    matrix = of_winners(FORWARD, H200, [*records, replace(MEASURED, workload=FORWARD, config=others[2])], 50)
    sources = [source for _, source in matrix.starts]
    assert (matrix.kind, sources) == (MATRIX, ["default", "incumbent", "neighbour", "neighbour"])
    backward = of_winners(BACKWARD, H200, records, 50)
    assert [source for _, source in backward.starts] == ["default"], "what won forward is none of its own"
    of_class = [replace(MEASURED, workload=near), MEASURED, *records]
    assert spread(of_class, 3) == [MEASURED.workload, records[1].workload, near]


@EXHAUSTIVE
def test_a_whole_row_of_a_matrix_goes_on_around_what_won() -> None:
    """Winners that are not valid here stand for the configs nearest to them."""
    spaces = {space.family: space for space in Candidates.of(FORWARD, H200).spaces}
    default = Candidates.of(FORWARD, H200).default
    elsewhere = Candidates.of(Workload.parse("b4-h16-s1024-d64-causal"), H200, ("hopper_forward",)).spaces[0].configs
    foreign = next(config for config in elsewhere if config not in spaces["hopper_forward"].configs)
    records = [replace(MEASURED, workload=FORWARD.with_shape(seqlen_q=512, seqlen_k=512), config=foreign)]
    assert len(of_winners(FORWARD, H200, records, 50).starts) == 1
    plan = of_winners(FORWARD, H200, records, 50, whole=True)
    assert (plan.kind, plan.candidates, len({config for config, _ in plan.starts})) == (MATRIX, 50, 50)
    assert all(config in spaces[config.family].configs for config, _ in plan.starts)
    (first, of_default), (second, near), *others = plan.starts
    lattice = Lattice(spaces["hopper_forward"])
    assert (first, of_default, near) == (default, "default", "neighbour")
    assert second == lattice.nearest(foreign, lattice.points) != first
    of_family, *around = others
    assert (of_family[0].family, of_family[1]) == ("portable_forward", "default")
    assert {source for _, source in around} == {"local"}
    assert around[0][0] in Lattice(spaces[first.family]).neighbours(first)
    assert of_winners(FORWARD, H200, records, 2, whole=True).starts == plan.starts[:2]
    assert plan == of_winners(FORWARD, H200, records, 50, whole=True)


def test_a_gpu_takes_its_shard_of_the_workloads_and_records_of_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = replay_tables._parser()
    keys = [FORWARD.key, BACKWARD.key]
    common = ["--out", str(tmp_path), *(word for key in keys for word in ("--workload", key))]
    parts = [
        [
            plan.workload
            for plan in replay_tables.planned(parser.parse_args([*common, *more, "--shard", part]), H200, [])
        ]
        for more in (["--configs", "9"], ["--matrix", "2"])
        for part in ("0/2", "1/2")
    ]
    assert parts == [[BACKWARD], [FORWARD]] * 2
    assert len({Workload.parse(key) for key in WHOLE}) == 16
    whole = [["--matrix", "16", "--whole", "--configs", "2", "--shard", f"{part}/4"] for part in range(4)]
    with monkeypatch.context() as patch:
        # each would enumerate the space of its workload
        patch.setattr(replay_tables, "of_winners", lambda workload, *given, whole: (workload, whole))
        quarters = [replay_tables.planned(parser.parse_args([*common[:2], *each]), H200, []) for each in whole]
    assert [len(plans) for plans in quarters] == [4] * 4
    assert {plan for plans in quarters for plan in plans} == {(Workload.parse(key), True) for key in WHOLE}
    executor = FakeExecutor(device=H100)
    monkeypatch.setattr(replay_tables, "make_executor", lambda index: executor)
    monkeypatch.setattr(replay_tables, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))
    row = ["--out", str(tmp_path), "--matrix", "1", "--configs", "6"]
    assert replay_tables.main([*row, "--workload", KNOWN.key]) == 0
    log = read_log(tmp_path / f"{KNOWN.key}-matrix.jsonl.gz")
    assert log.search is not None
    assert log.search.device == H100
    assert {trial.source for trial in log.trials} == {"default", "incumbent", "neighbour"}, "those of an H200"
    with pytest.raises(SystemExit, match="2"):
        replay_tables.main([*row, "--shard", "2/2"])
    assert "a shard is i/n" in capsys.readouterr().err


def test_the_command_takes_the_families_of_each_pass(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parser = replay_tables._parser()
    common = ["--out", str(tmp_path), "--workload", BACKWARD.key, "--workload", FORWARD.key]
    options = parser.parse_args([*common, "--families", "hopper_forward,hopper_backward_split", "--configs", "9"])
    backward, forward = replay_tables.planned(options, H200, [])
    assert (backward.families, len(backward.starts)) == (("hopper_backward_split",), 9)
    assert (forward.families, len(forward.starts)) == (("hopper_forward",), 9)


@EXHAUSTIVE
def test_the_command_measures_a_table_and_a_matrix_of_one_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay_tables, "make_executor", lambda index: FakeExecutor())
    monkeypatch.setattr(replay_tables, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))
    common = ["--out", str(tmp_path), "--workload", FORWARD.key]
    for configs in ("8", "20"):
        assert replay_tables.main([*common, "--families", "hopper_forward", "--configs", configs]) == 0
    log = read_log(tmp_path / f"{FORWARD.key}.jsonl.gz")
    times = {trial.config: trial.outcome.median_ms for trial in log.trials if isinstance(trial.outcome, Measurement)}
    assert min(times, key=lambda config: times[config]) in {each.config for each in log.finalists}, "of both lists"
    assert replay_tables.main([*common, "--families", "hopper_forward", "--limit-seconds", "0"]) == STOPPED
    assert "20 of 28 configs, stopped" in capsys.readouterr().out
    assert replay_tables.main([*common, "--matrix", "1", "--configs", "5"]) == 0
    kinds = {path.name: dict(read_log(path).search.settings)["kind"] for path in tmp_path.glob("*.gz")}  # type: ignore[union-attr]
    assert kinds == {f"{FORWARD.key}.jsonl.gz": EVERY, f"{FORWARD.key}-matrix.jsonl.gz": MATRIX}


# --- files ---------------------------------------------------------------------------------------------------------

LOG = SearchLog(search=SEARCH, trials=(KNOWN_TRIAL,), finalists=FINALISTS)


def test_a_search_comes_back_from_its_file_and_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz")]
    for path in paths:
        write_log(LOG, path)
    assert read_log(paths[0]) == LOG
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(DatabaseError, match=r"ends in \.jsonl\.gz"):
        write_log(LOG, tmp_path / "a.csv")
    with pytest.raises(DatabaseError, match="this one has none"):
        write_log(replace(LOG, search=None), paths[0])


def lines_of(tmp_path: Path) -> tuple[Path, list[dict[str, object]]]:
    path = tmp_path / "log.jsonl.gz"
    write_log(LOG, path)
    return path, [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"trial": {"knobs": {"block_m": "__import__('os')"}}}, "line 2 is ignored: source must be of type str"),
        ({"trial": [1]}, "an object of columns"),
        ({"other": {}}, "one of trial, finalist"),
        ({"trial": None}, "an object of columns"),
    ],
)
def test_a_bad_line_costs_itself(tmp_path: Path, change: dict[str, object], rule: str) -> None:
    path, lines = lines_of(tmp_path)
    lines[1] = change
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    with pytest.warns(UserWarning, match=rule):
        assert read_log(path) == replace(LOG, trials=())


@pytest.mark.parametrize("cell", [float("nan"), "fast", -1, [1e-9], {}, [True]])
def test_a_bad_time_costs_its_line(tmp_path: Path, cell: object) -> None:
    path, lines = lines_of(tmp_path)
    lines[1]["trial"]["times_ms"] = cell  # type: ignore[index]
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    with pytest.warns(UserWarning, match="line 2 is ignored"):
        assert read_log(path).trials == ()


def test_what_is_no_file_of_a_search_is_refused(tmp_path: Path) -> None:
    path, lines = lines_of(tmp_path)
    for content in (
        b"",
        b"no gzip",
        gzip.compress(b""),
        gzip.compress(b"[]\n"),
        gzip.compress(b"[" * 100_000),
        gzip.compress(json.dumps({**lines[0], "version": 2}).encode()),
        gzip.compress(json.dumps({**lines[0], "workload": {"key": 3}}).encode()),
        gzip.compress(bytes(MAX_BYTES + 1), 1),
    ):
        path.write_bytes(content)
        with pytest.raises(DatabaseError, match=r"file of a search|a line about workloads"):
            read_log(path)
