"""Displays show what happened: the live panel on a terminal, lines elsewhere."""

from __future__ import annotations

import functools
import io
import re
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from flashgen.cli import display, display_many
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
def events() -> list[Event]:
    """All events of a run over two workloads."""
    return list(told_once())


@functools.cache
def told_once() -> tuple[Event, ...]:
    """Events are frozen: one run tells all tests of the same."""
    told: list[Event] = []
    executor = FakeExecutor()
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder, "tuning.sqlite3")) as store:
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
    return tuple(told)


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
    assert re.search(r"done +━+╸? +99%", shown), shown


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


def test_the_share_of_a_run_only_grows_and_ends_at_one(events: list[Event]) -> None:
    progress, shares = Progress(Clock()), []
    for event in events:
        progress.update(event)
        shares.append(progress.share)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    halves = [share for share, event in zip(shares, events, strict=True) if isinstance(event, WorkloadFinished)]
    assert halves == [0.5, 1.0]
    assert len(set(shares)) > 20  # it moves with every trial


def test_a_bar_of_a_budget_in_seconds_follows_the_clock_and_waits_for_finals() -> None:
    clock = Clock()
    progress = Progress(clock)
    assert progress.share == 0.0
    progress.update(RunStarted(device=H200, workloads=WORKLOADS, measured=True))
    progress.update(
        WorkloadStarted(workload=WORKLOADS[0], candidates=0, resumed_trials=0, budget_trials=None, budget_s=20.0)
    )
    clock.now += 10
    assert progress.share == pytest.approx(0.25)
    clock.now += 100
    assert progress.share == pytest.approx(0.495)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_bar_is_as_long_as_what_is_done(share: float) -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen.print(display.share_bar(share))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert f"{share:.0%}" in shown
    assert shown.count("━") >= round(share * display.BAR_WIDTH) - 1


def test_runs_on_many_gpus_have_a_bar_on_a_terminal_and_lines_elsewhere(
    events: list[Event], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with display_many.make_display(as_json=False) as show:
        for event in events:
            show("node1/0", event)
    lines = capsys.readouterr().out.splitlines()
    assert f"node1/0: [2/2] {WORKLOADS[1].key}: tuned" in lines[-1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    with display_many.make_display(as_json=False) as bar:
        assert isinstance(bar, display_many.StationBar)
        for event in events:
            bar("node1/0", event)
        (task,) = bar._bar.tasks
        assert (task.completed, task.total) == (2, 2)
    shown = capsys.readouterr().out
    assert all(line in shown for line in lines)


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
