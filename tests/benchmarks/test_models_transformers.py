"""Whole models of transformers without a GPU: rows as they come, going on, the time limit, and the table of a page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import models_transformers as bench
from benchmarks import report, transformers_tables
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.models_transformers import CASES, Timed, available, measured, raced, small
from benchmarks.results import WHOLE_MODEL_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.time_limit import TimeLimit
from tests.benchmarks.rows import SHARED

NEVER = TimeLimit(math.inf, lambda: 0.0)


@pytest.fixture
def file(tmp_path: Path) -> ResultsFile:
    return ResultsFile(tmp_path / SHARED.slug / "models_transformers.csv", WHOLE_MODEL_COLUMNS)


@pytest.mark.parametrize("name", list(CASES))
def test_every_model_runs_with_every_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NEW_TOKENS", 3)
    for what in CASES[name].whats:
        found = raced(small(CASES[name]), what, 1, "cpu")
        assert list(found) == list(available())
        assert all(one.seconds and not one.reason for one in found.values()), found


def test_an_attention_that_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.ATTENTIONS, "eager", "no_such_attention")
    found = raced(small(CASES["gpt2"]), "forward", 1, "cpu")
    assert found["sdpa"].seconds
    assert found["eager"].seconds is None
    assert "no_such_attention" in found["eager"].reason


def test_rows_are_written_race_by_race_and_a_run_goes_on(file: ResultsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = [], [0.0]

    def race(case: bench.Case, what: str, rounds: int, device: str) -> dict[str, Timed]:
        assert len(read_rows(file.path)) == 2 * len(asked)
        asked.append((case.architecture, what))
        now[0] += 10.0
        return {"flashgen": Timed(seconds=0.5, peak_gib=1.5), "eager": Timed(reason="out of memory")}

    monkeypatch.setattr(bench, "raced", race)
    limit = TimeLimit(25.0, lambda: now[0])
    assert measured(["gpt2"], file, SHARED, limit, rounds=1, device="cuda") == STOPPED
    assert asked == [("GPT2LMHeadModel", "forward"), ("GPT2LMHeadModel", "forward+backward")]
    again = ResultsFile(file.path, WHOLE_MODEL_COLUMNS, append=True, commit=SHARED.commit)
    assert measured(["gpt2", "bert"], again, SHARED, NEVER, rounds=1, device="cuda") == 0
    assert asked[2:] == [
        ("GPT2LMHeadModel", "generate"),
        ("BertForMaskedLM", "forward"),
        ("BertForMaskedLM", "forward+backward"),
    ]
    rows = read_rows(file.path, WHOLE_MODEL_COLUMNS)
    assert [(row.suite, row.workload) for row in rows[:6:2]] == [
        ("transformers-gpt2", "forward-b8-s960"),
        ("transformers-gpt2", "forward+backward-b8-s960"),
        ("transformers-gpt2", "generate-b8-s960"),
    ]
    assert [row.tokens_per_s for row in rows[:6:2]] == [8 * 960 / 0.5, 8 * 960 / 0.5, 8 * 64 / 0.5]
    assert [(row.outcome, row.tokens_per_s) for row in rows[1:6:2]] == [("out of memory", None)] * 3
    monkeypatch.setattr(bench, "raced", lambda *_: {"flashgen": Timed(reason="why")})
    other = ResultsFile(file.path.with_name("other.csv"), WHOLE_MODEL_COLUMNS)
    assert measured(["bert"], other, SHARED, NEVER, rounds=1, device="cuda") == MISSING


def whole(suite: str, workload: str, impl: str, rate: float | None) -> Row:
    return Row(
        suite=suite,
        workload=workload,
        impl=impl,
        impl_version="1.0 transformers 5.0",
        outcome="" if rate else "out of | memory",
        tokens_per_s=rate,
        device=SHARED.device,
        torch=SHARED.torch,
        triton=SHARED.triton,
        commit=SHARED.commit,
        date="2026-11-20",
    )


def test_the_page_has_a_line_for_each_race(tmp_path: Path, file: ResultsFile) -> None:
    assert set(transformers_tables.TITLES) == {bench.SUITE + name for name in CASES}
    assert set(transformers_tables.IMPLS) == set(bench.ATTENTIONS)
    assert "**not measured**" in transformers_tables.page({})
    rates = {"flashgen": 12000.0, "sdpa": 8000.0, "eager": None}
    file.write(whole("transformers-bert", "forward+backward-b16-s512", impl, rate) for impl, rate in rates.items())
    file.write([whole("transformers-gpt2", "generate-b8-s960", "flashgen", 900.0)])
    page = tmp_path / report.MODELS_PAGE
    page.parent.mkdir()
    page.write_text(f"# Models\n{transformers_tables.START}\nstale\n{transformers_tables.END}\nmore\n")
    (tmp_path / "README.md").write_text(f"{report.START}\n{report.END}\n")
    given = ["--results", str(tmp_path), "--readme", str(tmp_path / "README.md")]
    assert report.main(given) == 0
    lines = page.read_text().splitlines()
    assert lines[:2] == ["# Models", transformers_tables.START]
    assert lines[-2:] == [transformers_tables.END, "more"]
    assert "| model | what | batch | tokens | flashgen | SDPA | eager | over SDPA |" in lines
    assert "| BERT-base | forward+backward | 16 | 512 | 12,000 | 8,000 | - | 1.50 |" in lines
    assert "| GPT-2 | generate | 8 | 960 | 900 | - | - | - |" in lines
    assert "Without a figure: out of / memory (eager in BERT-base, forward+backward)." in page.read_text()
    assert "commit 0123456789ab, 2026-11-20. transformers 5.0." in page.read_text()
    page.write_text(page.read_text().replace("1.50", "1.51"))
    assert report.main([*given, "--check"]) == 1


def test_the_committed_page_is_what_the_results_give() -> None:
    page = (report.ROOT / report.MODELS_PAGE).read_text()
    marks = (transformers_tables.START, transformers_tables.END)
    found = report.insert(page, transformers_tables.page(report.load(report.RESULTS)), marks)
    assert found == page, "run python -m benchmarks.report"
