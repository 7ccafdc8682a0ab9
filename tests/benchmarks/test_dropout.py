"""The benchmark of dropout: its grid, what it times, and its rows, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import dropout
from benchmarks.dropout_tables import dropout_parts
from benchmarks.exit_codes import MISSING
from benchmarks.provenance import Provenance
from benchmarks.results import COLUMNS, read_rows
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Workload
from tests.benchmarks.rows import SHARED

CPU = torch.device("cpu")
SMALL = Workload(batch=1, nheads=2, seqlen_q=16, head_dim=16, causal=True)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=causal)


def unable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    raise UnsupportedError("no kernel\nin two lines")


def test_the_grid_has_both_directions_and_every_implementation_a_twin() -> None:
    assert {workload.direction for workload in dropout.grid()} == {"forward", "backward"}
    assert all(workload.batch * workload.seqlen_q == dropout.TOKENS for workload in dropout.grid())
    assert list(dropout.IMPLS)[:2] == ["flashgen", "flashgen-dropout"]


@pytest.mark.parametrize(("first", "expected"), [("flashgen", MISSING), ("sdpa-flash-dropout", 0)])
def test_a_run_writes_rows(
    first: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Provenance, "here", lambda commit: replace(SHARED, commit=commit))
    monkeypatch.setattr(dropout, "WHERE", CPU)
    monkeypatch.setattr(dropout, "serve_generated", lambda db, scratch: None)
    monkeypatch.setattr(dropout, "grid", lambda: (SMALL, replace(SMALL, direction="backward")))
    monkeypatch.setattr(dropout, "IMPLS", {first: unable, "flashgen-dropout": attend})
    arguments = ["--results", str(tmp_path), "--commit", "abc", "--seconds", "0.001"]
    assert dropout.main(arguments) == expected
    rows = read_rows(tmp_path / SHARED.slug / "dropout.csv", COLUMNS)
    assert [(row.suite, row.impl) for row in rows] == [("dropout", "flashgen-dropout")] * 2
    assert all(row.median_ms is not None and row.median_ms > 0 for row in rows)
    assert "no row: no kernel\n" in "".join(capsys.readouterr())
    assert dropout.main([*arguments, "--append"]) == expected
    assert len(read_rows(tmp_path / SHARED.slug / "dropout.csv", COLUMNS)) == 2


def test_the_table_has_a_row_for_each_pass_and_nothing_without_rows() -> None:
    times = {"flashgen": 1.0, "flashgen-dropout": 2.0, "sdpa-flash-dropout": 3.0}
    rows = [
        SHARED.row(dropout.SUITE, workload, impl, "1", median_ms=ms)
        for workload in (SMALL, replace(SMALL, direction="backward", causal=False))
        for impl, ms in times.items()
    ]
    title, text, table = dropout_parts(rows)
    assert title == "### Dropout"
    assert "dropout_p=0.1" in text
    assert table.splitlines()[2:] == [
        "| forward | 1 | 16 | 16 | yes | 1.000 | 2.000 | 3.000 | - | 1.50 |",
        "| backward | 1 | 16 | 16 | no | 1.000 | 2.000 | 3.000 | - | 1.50 |",
    ]
    assert dropout_parts([]) == []
