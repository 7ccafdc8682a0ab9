"""Distances from float64: what is measured of an output, what a run writes and goes on with, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, report
from benchmarks.accuracy import PEERS, Distance, accuracy_grid, main, measured, run
from benchmarks.accuracy_tables import over_the_most_exact
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.forward import Job
from benchmarks.impls import Call, Impl
from benchmarks.merge import GRIDS, merge
from benchmarks.provenance import Provenance
from benchmarks.results import ACCURACY_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.suites import data_grid
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.measure.inputs import Inputs
from tests.benchmarks.rows import SHARED

SMALL = Workload(batch=2, nheads=2, seqlen_q=64, head_dim=32, causal=True)


def impl(name: str, change: float = 0.0, value: float | None = None) -> Impl:
    """Torch's attention on the CPU, its output times 1 + `change` in the last row; `value` in the place of all."""

    def prepare(workload: Workload, inputs: Inputs) -> Call:
        def call(n: int) -> torch.Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(
                inputs.q[n], inputs.k[n], inputs.v[n], is_causal=workload.causal
            )
            out[..., -1, :] *= 1 + change
            return out if value is None else out.fill_(value)

        return Call(run=call)

    return Impl(name=name, version=lambda: "1", unsupported=lambda workload: None, prepare=prepare)


def test_an_error_is_that_of_the_output_and_of_its_worst_row() -> None:
    job, where = Job(suite="accuracy", workload=SMALL, data="std8"), torch.device("cpu")
    exact, off, broken = measured(job, [impl("a"), impl("b", 0.5), impl("c", value=float("nan"))], where=where)
    assert isinstance(exact, Distance)
    assert isinstance(off, Distance)
    assert exact.relative_error < exact.worst_row < 1e-2, "bf16 rounds to 2**-9"
    assert off.worst_row == pytest.approx(0.5, abs=0.01)
    assert off.relative_error == pytest.approx(0.5 / 8, rel=0.5), "one of 64 rows of about equal norms"
    assert broken == "its output is not finite everywhere"


def test_what_cannot_run_costs_its_own_row() -> None:
    def fails(workload: Workload, inputs: Inputs) -> Call:
        raise RuntimeError("no kernel\nof this kind")

    job = Job(suite="accuracy", workload=SMALL, data="randn")
    refused = replace(impl("b"), unsupported=lambda workload: "has no such mask")
    found = measured(job, [replace(impl("a"), prepare=fails), refused, impl("c")], where=torch.device("cpu"))
    assert found[:2] == ["RuntimeError: no kernel", "has no such mask"]
    assert isinstance(found[2], Distance)


def of_impl(job: Job, impls: Sequence[Impl]) -> list[Distance | str]:
    """In the place of a GPU: FA3 has no fp16, flashgen 1.5 times the error of the others, and one key nearly none."""
    base = 1e-7 if job.data == "peak" else 2e-3
    shares = {"flashgen": 1.5}
    return [
        "no fp16"
        if (one.name, job.workload.dtype) == ("fa3", "fp16")
        else Distance(relative_error=base * shares.get(one.name, 1.0), worst_row=2 * base)
        for one in impls
    ]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(accuracy, "serve_generated", lambda db, scratch: None)
    monkeypatch.setattr(accuracy, "measured", lambda job, impls, where: of_impl(job, impls))


def rows_of(results: Path) -> list[Row]:
    return read_rows(results / SHARED.slug / "accuracy.csv", ACCURACY_COLUMNS)


@pytest.mark.usefixtures("on_a_gpu")
def test_every_shape_is_measured_on_every_kind_and_tabled(tmp_path: Path) -> None:
    assert main(["--results", str(tmp_path)]) == 0
    rows = rows_of(tmp_path)
    grid = {(shape.key, kind) for shape in accuracy_grid() for kind in DATA_KINDS}
    assert {(row.workload, row.data) for row in rows} == grid
    assert set(accuracy_grid()) < set(data_grid())
    page = report.page_of({SHARED.slug: rows}, "img")
    assert "| bf16 | std8 | 3.00 | 2.00 | 2.00 | 2.00 | 2.00 | 1.50 | 1.50 |" in page
    assert "| fp16 | std8 | 3.00 | 2.00 | 2.00 | - | 2.00 | 1.50 | 1.50 |" in page
    assert "| bf16 | peak | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | - | - |" in page


@pytest.mark.usefixtures("on_a_gpu")
def test_two_shards_are_merged_and_half_is_refused(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        assert main(["--results", str(folder), "--shard", f"{number}/2"]) == 0
    with pytest.raises(ValueError, match="every workload of the suite accuracy"):
        merge(folders[:1], tmp_path / "into")
    merge(folders, tmp_path / "into")
    rows = rows_of(tmp_path / "into")
    assert list(dict.fromkeys(row.workload for row in rows)) == [shape.key for shape in GRIDS["accuracy"]()]
    assert len(rows) == len(rows_of(folders[0])) + len(rows_of(folders[1]))


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    jobs = [Job(suite="accuracy", workload=SMALL, data=kind) for kind in DATA_KINDS]
    ticks = iter(range(0, 1000, 10))
    file = ResultsFile(tmp_path / "accuracy.csv", ACCURACY_COLUMNS)
    assert run(jobs, PEERS, file, SHARED, of_impl, 35.0, lambda: float(next(ticks))) == STOPPED
    some = len(file.rows)
    assert 0 < some < len(jobs) * len(PEERS)
    again = ResultsFile(file.path, ACCURACY_COLUMNS, append=True, commit=SHARED.commit)
    assert run(jobs, PEERS, again, SHARED, of_impl) == 0
    assert len(again.rows) == len({row.subject for row in again.rows}) == len(jobs) * len(PEERS)


def test_flashgen_without_a_row_is_told_by_the_exit_code(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "accuracy.csv", ACCURACY_COLUMNS)
    jobs = [Job(suite="accuracy", workload=SMALL, data="randn")]
    assert run(jobs, PEERS, file, SHARED, lambda job, impls: ["broken" for _ in impls]) == MISSING
    assert file.rows == []


def test_errors_are_compared_with_the_most_exact_peer_where_there_is_any() -> None:
    def row(impl: str, error: float, data: str = "std8") -> Row:
        found = SHARED.row("accuracy", SMALL, impl, "1", data=data)
        return replace(found, relative_error=error, worst_row=error)

    assert over_the_most_exact([row("flashgen", 3e-3), row("fa3", 2e-3), row("fa4", 4e-3)]) == [pytest.approx(1.5)]
    assert over_the_most_exact([row("flashgen", 3e-7), row("fa3", 2e-9)]) == []
    assert over_the_most_exact([row("flashgen", 3e-3), row("fa3", 0.0)]) == [pytest.approx(300.0)]
    assert over_the_most_exact([row("flashgen", 3e-3)]) == []
