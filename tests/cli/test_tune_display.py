"""Displays show what happened: the live panel on a terminal, lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flashgen.cli import display
from flashgen.codegen.families import default_config
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, RunStarted, TrialFinished, WorkloadFinished, WorkloadStarted
from flashgen.tuning.progress import Progress
from flashgen.tuning.report import short_config
from flashgen.tuning.tune import tune
from tests.tuning.fakes import H200, Clock, FakeCompiler, FakeExecutor

WORKLOADS = (
    Workload(batch=1, nheads=8, seqlen_q=2048, head_dim=128),
    Workload(batch=1, nheads=12, seqlen_q=1024, head_dim=64, causal=True),
)


@pytest.fixture
def events(tmp_path: Path) -> list[Event]:
    """All events of a run over two workloads."""
    told: list[Event] = []
    executor = FakeExecutor()
    with Store.open(tmp_path / "tuning.sqlite3") as store:
        tune(
            WORKLOADS,
            device=H200,
            store=store,
            compiler=FakeCompiler(),
            executor=executor,
            budget=Budget(trials=15),
            options=Options(),
            on_event=told.append,
            clock=executor.clock,
        )
    return told


def test_the_panel_shows_trials_best_peak_failures_and_time_left(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = display.Panel()
    screen = Console(file=io.StringIO(), width=160)
    monkeypatch.setattr(panel, "_console", screen)
    last_trial = max(n for n, event in enumerate(events) if isinstance(event, TrialFinished))
    for event in events[: last_trial + 1]:
        panel(event)
    screen.print(panel._render())
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "2 of 2 on NVIDIA H200" in shown
    assert WORKLOADS[1].key in shown
    assert "15 of " in shown
    assert "TFLOP/s" in shown
    assert "of peak" in shown
    assert "resources" in shown
    assert "time left" in shown
    assert f"[1/2] {WORKLOADS[0].key}: tuned" in shown


def test_the_panel_starts_and_stops(events: list[Event]) -> None:
    with display.Panel() as panel:
        for event in events:
            panel(event)


def test_lines_tell_new_bests_and_that_a_search_is_alive(
    events: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    lines = display.PlainLines(clock)
    start = next(n for n, event in enumerate(events) if isinstance(event, WorkloadStarted))
    trials = [event for event in events[start:] if isinstance(event, TrialFinished)]
    for event in events[: start + 1]:
        lines(event)
    lines(trials[0])
    before = capsys.readouterr().out
    assert "1 of" in before
    lines(trials[0])
    assert capsys.readouterr().out == ""
    clock.now += display.QUIET_S
    lines(trials[0])
    assert "1 of" in capsys.readouterr().out


def test_progress_estimates_the_rest(events: list[Event]) -> None:
    clock = Clock()
    progress = Progress(clock)
    assert progress.left_s is None
    for event in events:
        progress.update(event)
        if isinstance(event, TrialFinished):
            clock.now += 1.0
            if progress.ended == 0 and progress.trials == 5:
                # 5 of 15 trials took 5 s: 10 s of this workload and 15 of the next are left
                assert progress.left_s == pytest.approx(25.0)
    assert progress.ended == 2
    assert progress.left_s == 0.0
    assert sum(progress.failures.values()) > 0


def test_progress_of_a_budget_in_seconds_counts_down() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.update(RunStarted(device=H200, workloads=WORKLOADS, measured=True))
    progress.update(
        WorkloadStarted(workload=WORKLOADS[0], candidates=9, resumed_trials=0, budget_trials=None, budget_s=20.0)
    )
    clock.now += 5
    assert progress.left_s == pytest.approx(35.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (5.4, "5 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7200, "2.0 h")]
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert display.duration(seconds) == text


def test_a_config_that_no_model_ranked_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workload, _), config = WORKLOADS, default_config(WORKLOADS[0].specialization, H200)
    record = TuningRecord(workload=workload, device=H200, config=config, provenance="predicted")
    lines = display.PlainLines(Clock())
    lines(RunStarted(device=H200, workloads=(workload,), measured=False))
    lines(
        WorkloadFinished(
            workload=workload, status="predicted", record=record, trials=1, failures=(), reason="no model", seconds=1.0
        )
    )
    assert f"[1/1] {workload.key}: predicted, {short_config(record)} (no model)" in capsys.readouterr().out
