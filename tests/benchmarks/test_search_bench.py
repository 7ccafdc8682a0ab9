"""What benchmarks of searches share: when it is opened and closed, and what a file has not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import search_bench
from benchmarks.search_bench import Bench, add_run_arguments
from benchmarks.search_files import STAMP, add_rows, read
from flashgen.core.device import Device
from flashgen.core.workload import Workload
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options, lookahead
from tests.tuning.fakes import H200, FakeExecutor

WORKLOADS = [Workload.parse(key) for key in ("b1-h1-s512-d64", "b1-h1-s1024-d64")]


def opened(folder: Path, *more: str) -> tuple[argparse.ArgumentParser, argparse.Namespace, str]:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser, out="a folder")
    common = ["--out", str(folder / "out"), "--results", str(folder), "--commit", "0123456789ab"]
    return parser, parser.parse_args([*common, *more]), "rows.csv"


def closings(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    found: list[FakeExecutor] = []
    monkeypatch.setattr(executor, "close", lambda: found.append(executor))
    return found


def test_it_adds_stamped_rows_of_what_a_file_has_not(here: FakeExecutor, tmp_path: Path) -> None:
    with Bench.open(*opened(tmp_path, "--jobs", "3")) as bench:
        assert bench.left(WORKLOADS) == WORKLOADS
        bench.add(("workload", "ms"), [{"workload": WORKLOADS[0].key, "ms": "1"}])
        assert bench.left(WORKLOADS) == WORKLOADS[1:]
        context = bench.context(None, budget=Budget(trials=1), options=Options())  # type: ignore[arg-type]
    assert (context.device, context.options.lookahead) == (here.device, lookahead(3))
    (row,) = read(tmp_path / "nvidia_h200" / "rows.csv")
    assert list(row) == ["workload", "ms", *STAMP]
    assert (row["device"], row["commit"]) == ("NVIDIA H200", "0123456789ab")


def test_the_gpu_is_given_back_whatever_fails(
    here: FakeExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(device: Device, jobs: int) -> None:
        raise OSError("no processes")

    closed = closings(here, monkeypatch)
    with pytest.raises(ZeroDivisionError), Bench.open(*opened(tmp_path)):
        raise ZeroDivisionError
    assert len(closed) == 1
    monkeypatch.setattr(search_bench, "make_compiler", failing)
    with pytest.raises(OSError, match="no processes"), Bench.open(*opened(tmp_path)):
        pass
    assert len(closed) == 2
    path = tmp_path / H200.slug / "rows.csv"
    add_rows(path, ("workload", "commit"), [{"workload": "w", "commit": "ba9876543210"}])
    with pytest.raises(SystemExit, match="2"), Bench.open(*opened(tmp_path)):
        pass
    assert len(closed) == 3
    assert "rows of a file are of one commit" in capsys.readouterr().err


def test_a_search_is_judged_by_a_record_of_its_own_device_first(bench: Callable[[FakeExecutor], Bench]) -> None:
    ours = bench(FakeExecutor())
    assert ours.judge(Workload.parse("b1-h1-s7-d64")) is None
    record = next(record for record, _ in ours.layers.records(device=H200, provenance="measured"))
    found = ours.judge(record.workload)
    assert found is not None
    assert found.device.identity == H200.identity
