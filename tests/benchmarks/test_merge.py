"""What several GPUs measured becomes one folder of results, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import curves
from benchmarks.merge import GRIDS, KINDS, main, merge
from benchmarks.results import DATA_COLUMNS, RACE_COLUMNS, RESULTS, TRAINING_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.search_files import FILES, FROM_NOTHING, STAMP, add_rows, read
from benchmarks.suites import DATA_SUITE, data_grid, paper_grid
from benchmarks.training_tasks import EAGER_SUITE
from benchmarks.varlen import Timed
from benchmarks.varlen import row_of as packed_row
from benchmarks.varlen_cases import PACKS
from benchmarks.varlen_impls import IMPLS
from flashgen.measure.data_kinds import DATA_KINDS
from tests.benchmarks.rows import SHARED, row, training_row

ROWS = [row(workload, impl, 100.0) for workload in paper_grid() for impl in ("flashgen", "flex")]
NAME = f"{SHARED.slug}/forward.csv"


def write(folder: Path, rows: Sequence[Row], name: str = NAME, columns: Sequence[str] = RACE_COLUMNS) -> Path:
    """Rows in a file of a folder of results, which is returned."""
    ResultsFile(folder / name, columns).write(rows)
    return folder


def shards(tmp_path: Path, change: Callable[[Row], Row] = lambda each: each) -> list[Path]:
    """The rows of the grid in two folders, every second workload in each; the second ones are changed."""
    of_first = {workload.key for workload in paper_grid()[::2]}
    mine = [each for each in ROWS if each.workload in of_first]
    theirs = [change(each) for each in ROWS if each.workload not in of_first]
    return [write(tmp_path / "a", mine), write(tmp_path / "b", theirs)]


def test_shards_become_the_file_that_one_gpu_would_have_written(tmp_path: Path) -> None:
    folders = shards(tmp_path, lambda each: replace(each, date="2026-11-21"))
    for order in (folders, folders[::-1]):
        (path,) = merge(order, tmp_path / "into")
        assert path == tmp_path / "into" / NAME
        rows = read_rows(path, RACE_COLUMNS)
        assert [each.subject for each in rows] == [each.subject for each in ROWS]
    assert {each.date for each in rows} == {"2026-11-20", "2026-11-21"}


def test_rows_of_a_peer_are_lost_only_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = write(tmp_path / "into", [*ROWS, row(paper_grid()[0], "vllm", 90.0)])
    before = (into / NAME).read_bytes()
    given = [*map(str, shards(tmp_path)), "--into", str(into)]
    with pytest.raises(SystemExit, match="2"):
        main(given)
    assert "forward.csv has rows of vllm, and no folder has: --without vllm loses them" in capsys.readouterr().err
    assert (into / NAME).read_bytes() == before
    assert main([*given, "--without", "vllm"]) == 0
    said = f"  1 rows that it had are in no folder: forward {paper_grid()[0].key} vllm\n"
    assert capsys.readouterr().out == f"{into / NAME}\n{said}"
    assert main(given) == 0
    assert capsys.readouterr().out == f"{into / NAME}\n"
    assert {each.impl for each in read_rows(into / NAME)} == {"flashgen", "flex"}


def test_runs_of_training_are_merged_with_their_losses(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, lengths in zip(folders, ((16384, 1024), (4096,)), strict=True):
        rows = [
            training_row(EAGER_SUITE, str(seqlen), impl, 1e5)
            for seqlen in lengths
            for impl in ("sdpa-flash", "flashgen")
        ]
        write(folder, rows, f"{SHARED.slug}/training.csv", TRAINING_COLUMNS)
        for number, each in enumerate(rows):
            curves.append(folder / SHARED.slug / "training_loss.csv", each.subject, each.commit, [9.0, 8.0 - number])
    curves.append(folders[1] / SHARED.slug / "training_accuracy.csv", ("paths", "w", "x"), "c", [0.5], curves.ACCURACY)
    rows_path, accuracies, losses = merge(folders, tmp_path / "into")
    assert curves.read(accuracies, curves.ACCURACY) == {("paths", "w", "x"): [0.5]}
    found = read_rows(rows_path, TRAINING_COLUMNS)
    assert [(each.workload.split("-sq")[1].split("-")[0], each.impl) for each in found] == [
        (str(seqlen), impl) for seqlen in (1024, 4096, 16384) for impl in ("sdpa-flash", "flashgen")
    ]
    assert list(curves.read(losses)) == [each.subject for each in found]
    assert curves.read(losses)[found[-1].subject] == [9.0, 7.0]
    curves.append(folders[1] / SHARED.slug / "training_loss.csv", found[0].subject, found[0].commit, [9.0])
    with pytest.raises(ValueError, match="a curve is in one file alone, got training "):
        merge(folders, tmp_path / "into")


def data_rows() -> list[Row]:
    """flashgen on every workload and every kind of data."""
    every = [(workload, kind) for workload in data_grid() for kind in DATA_KINDS]
    return [replace(row(workload, "flashgen", 100.0, suite=DATA_SUITE), data=kind) for workload, kind in every]


@pytest.mark.parametrize("by", ["workload", "data"])
def test_kinds_of_data_are_merged_however_they_were_shared(by: str, tmp_path: Path) -> None:
    rows, name = data_rows(), f"{SHARED.slug}/data.csv"
    of_first = set(sorted({getattr(each, by) for each in rows})[::2])
    folders = [
        write(tmp_path / folder, [each for each in rows if (getattr(each, by) in of_first) == mine], name, DATA_COLUMNS)
        for folder, mine in (("a", True), ("b", False))
    ]
    (path,) = merge(folders[::-1], tmp_path / "into")
    assert [each.subject for each in read_rows(path, DATA_COLUMNS)] == [each.subject for each in rows]


def test_batches_of_packed_sequences_are_merged_and_all_there(tmp_path: Path) -> None:
    rows, name = (
        [packed_row(pack, IMPLS[0], Timed(ms=0.5, timing="queue"), SHARED) for pack in PACKS],
        f"{SHARED.slug}/varlen.csv",
    )
    halves = [write(tmp_path / str(part), rows[part::2], name, DATA_COLUMNS) for part in range(2)]
    (path,) = merge(halves[::-1], tmp_path / "into")
    assert [each.subject for each in read_rows(path, DATA_COLUMNS)] == [each.subject for each in rows]
    with pytest.raises(ValueError, match=r"no folder has .*-varlen-(\w+) \1 and \d more"):
        merge(halves[:1], tmp_path / "into")


def test_a_kind_of_data_that_nobody_has_is_refused(tmp_path: Path) -> None:
    rows, name = data_rows(), f"{SHARED.slug}/data.csv"
    missing = [each for each in rows if each.data != "peak" or each.workload != data_grid()[1].key]
    with pytest.raises(ValueError, match=f"data.csv has every .* no folder has {data_grid()[1].key} peak$"):
        merge([write(tmp_path / "a", missing, name, DATA_COLUMNS)], tmp_path / "into")
    twice = [write(tmp_path / folder, rows, name, DATA_COLUMNS) for folder in ("b", "c")]
    with pytest.raises(ValueError, match=r"in one folder alone, got data fwd-.* flashgen randn twice"):
        merge(twice, tmp_path / "into")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"commit": "fedcba987654"},
            "commit of all rows of forward.csv is one and the same, got 0123456789ab and fedc",
        ),
        ({"device": "Other GPU"}, "device of all rows"),
        ({"torch": "2.12.0"}, "torch of all rows"),
        ({"triton": "3.7.0"}, "triton of all rows"),
        ({"impl_version": "2.0"}, r"version of fl\w+ in forward.csv is one and the same, got 1.0 and 2.0"),
    ],
)
def test_what_does_not_belong_together_is_refused(change: dict[str, str], message: str, tmp_path: Path) -> None:
    folders = shards(tmp_path, lambda each: replace(each, **change))
    with pytest.raises(ValueError, match=message):
        merge(folders, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def searched(folder: Path, workload: str, **changes: str) -> Path:
    """A folder of results with a row of a race of searches, which has columns of its own."""
    path = folder / SHARED.slug / FROM_NOTHING
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = dict(zip(STAMP, ("NVIDIA H200", "2.11.0", "3.6.0", "0123456789ab", "2026-11-27"), strict=True))
    add_rows(path, ("workload", "way", *STAMP), [{"workload": workload, "way": "20 s", **stamp, **changes}])
    return folder


def test_races_of_searches_are_merged_in_the_order_of_the_folders(tmp_path: Path) -> None:
    folders = [searched(tmp_path / name, name, date=f"2026-11-2{day}") for day, name in enumerate("ba")]
    write(folders[0], ROWS)
    found = merge(folders, tmp_path / "into")
    assert found == [tmp_path / "into" / SHARED.slug / name for name in ("forward.csv", FROM_NOTHING)]
    assert [row["workload"] for row in read(found[1])] == ["b", "a"]
    merge(folders[:1], tmp_path / "into")
    assert [row["workload"] for row in read(found[1])] == ["b"], "in place of what was there"


@pytest.mark.parametrize(
    ("workload", "change", "message"),
    [
        ("w", {}, "a workload of from_nothing.csv is in one folder alone, got w twice"),
        ("other", {"commit": "ba9876543210"}, "have one commit, got 0123456789ab and ba9876543210"),
        ("other", {"triton": "3.7.1"}, "have one triton"),
        ("other", {"device": "NVIDIA H100"}, "have one device"),
    ],
)
def test_races_of_searches_that_do_not_fit_are_refused(
    workload: str, change: dict[str, str], message: str, tmp_path: Path
) -> None:
    folders = [searched(tmp_path / "a", "w"), searched(tmp_path / "b", workload, **change)]
    with pytest.raises(ValueError, match=message):
        merge(folders, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_row_that_two_folders_have_is_refused(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    ResultsFile(second / NAME, RACE_COLUMNS, append=True).write([ROWS[0]])
    with pytest.raises(
        ValueError, match=r"a row of forward.csv is in one folder alone, got forward fwd-.* flashgen twice"
    ):
        merge([first, second], tmp_path / "into")


def test_a_workload_that_nobody_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = shards(tmp_path)
    message = f"forward.csv has every workload of the suite forward; no folder has {paper_grid()[1].key} and 17 more"
    with pytest.raises(ValueError, match=message):
        merge([first], tmp_path / "into")
    with pytest.raises(SystemExit) as done:
        main([str(first), "--into", str(tmp_path / "into")])
    assert done.value.code == 2
    assert message in capsys.readouterr().err


def test_folders_are_of_one_device_and_not_empty(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    other = write(tmp_path / "c", ROWS, "other_gpu/forward.csv")
    with pytest.raises(ValueError, match="device of all folders is one and the same, got other_gpu and test_gpu"):
        merge([first, second, other], tmp_path / "into")
    with pytest.raises(ValueError, match=r"a folder of results has .*, got \S+/nothing"):
        merge([first, second, tmp_path / "nothing"], tmp_path / "into")


def test_the_command_line_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = shards(tmp_path)
    assert main([*map(str, folders), "--into", str(tmp_path / "into")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'into' / NAME}\n"
    assert len(read_rows(tmp_path / "into" / NAME)) == len(ROWS)


def test_committed_files_have_every_workload_of_their_suites() -> None:
    """What the merging of shards asks for holds for what is there, so the table of grids is that of the benchmarks."""
    for path in RESULTS.glob("*/*.csv"):
        if path.name in (*curves.FILES.values(), *FILES):
            continue
        rows = read_rows(path)
        for suite in {each.suite for each in rows} & GRIDS.keys():
            there = {(each.workload, each.data) for each in rows if each.suite == suite}
            wanted = {(each.key, kind) for each in GRIDS[suite]() for kind in KINDS.get(suite, (each.lengths,))}
            assert there == wanted, f"{path}, {suite}"
