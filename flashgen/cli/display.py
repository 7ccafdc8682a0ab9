"""How a tuning run looks: a live panel on a terminal, plain lines in a pipe, one JSON object a line for machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from flashgen.cli import output
from flashgen.core.device import Device
from flashgen.core.quoting import plural, printable
from flashgen.tuning.events import (
    Event,
    FinalsStarted,
    RunFinished,
    RunStarted,
    Warned,
    WorkloadFinished,
    WorkloadStarted,
    to_json,
)
from flashgen.tuning.progress import Progress
from flashgen.tuning.report import ReportRow, report_rows, short_config

if TYPE_CHECKING:
    from rich.table import Table

QUIET_S = 10.0
"""Plain lines: a search without a new best says at least so often that it is alive."""

BAR_WIDTH = 40
"""Characters of the bar of a run."""

STAGES = {"search": "searching", "near": "comparing the best", "last": "finals"}
COLUMNS = (
    "workload",
    "pass",
    "features",
    "config",
    "ms",
    "TFLOP/s",
    "of peak",
    "vs SDPA",
    "hard data",
    "spread",
    "source",
)


class Display(Protocol):
    """Shows events; a context manager around the run."""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        ...

    def __enter__(self) -> Display:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, and leave the terminal as it was."""
        ...


def make_display(*, as_json: bool) -> Display:
    """The display that suits the output."""
    if as_json:
        return JsonLines()
    return Panel() if sys.stdout.isatty() else PlainLines()


class _Shown:
    """A display without anything to set up or to clean up."""

    def __enter__(self) -> _Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def __call__(self, event: Event) -> None:
        raise NotImplementedError


class JsonLines(_Shown):
    """One JSON object a line."""

    def __call__(self, event: Event) -> None:
        """Print it."""
        sys.stdout.write(to_json(event) + "\n")
        sys.stdout.flush()


class PlainLines(_Shown):
    """Lines that make sense in a log: starts, new bests, finals, ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = Progress(clock)
        self._best_ms: float | None = None
        self._spoke = clock()

    def __call__(self, event: Event) -> None:
        """Print what is new."""
        self._progress.update(event)
        line = _event_line(event, self._progress)
        if isinstance(event, WorkloadStarted):
            self._best_ms = None
        if line is None and self._is_news():
            line = f"  {progress_line(self._progress)}"
        if line is not None:
            output.say(line)
            self._spoke = self._clock()

    def _is_news(self) -> bool:
        best = self._progress.best_ms
        if best is not None and (self._best_ms is None or best < self._best_ms):
            self._best_ms = best
            return True
        return self._clock() - self._spoke >= QUIET_S


class Panel:
    """A few lines at the bottom of the terminal that are always current; ended workloads scroll above them."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = Progress()
        self._console = Console()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Panel:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take an event into the panel."""
        self._progress.update(event)
        line = None if isinstance(event, (FinalsStarted, WorkloadStarted)) else _event_line(event, self._progress)
        if line is not None:
            self._console.print(printable(line), markup=False, highlight=False)

    def _render(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        table = Table.grid(padding=(0, 2))
        name = progress.device.name if progress.device else "starting"
        rows = [
            ("workload", f"{progress.ended + (progress.workload is not None)} of {progress.total} on {name}"),
            ("now", progress.workload.key if progress.workload else "-"),
            (STAGES[progress.stage], progress_line(progress) if progress.workload else "-"),
            ("best", ", ".join(f"{k}={v}" for k, v in progress.best_config.knobs) if progress.best_config else "-"),
            ("going on", gain_text(progress)),
            ("failures", failures_text(progress)),
            ("time left", duration(progress.left_s)),
        ]
        for label, value in rows:
            table.add_row(Text(label, style="bold"), Text(printable(value), overflow="fold"))
        table.add_row(Text("done", style="bold"), share_bar(progress.share))
        return table


def share_bar(share: float) -> Table:
    """A bar and a percentage of what is done."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    line = Table.grid(padding=(0, 2))
    line.add_row(
        ProgressBar(total=1.0, completed=share, width=BAR_WIDTH), f"{int(100 * share)}%"
    )  # 100 only at the end
    return line


def progress_line(progress: Progress) -> str:
    """Trials and the best of the current workload."""
    tried = f"{progress.trials} of {progress.candidates} candidates tried"
    if progress.best_ms is None or progress.best_tflops is None:
        return f"{tried}, none valid so far"
    share = progress.best_peak_share
    peak = "" if share is None else f", {share:.0%} of peak"
    word = "best" if progress.measured else "best predicted"
    return f"{tried}, {word} {progress.best_ms:.4g} ms, {progress.best_tflops:.0f} TFLOP/s{peak}"


def gain_text(progress: Progress) -> str:
    """What going on for as long again is expected to save."""
    gain = progress.expected_gain
    return "-" if gain is None else f"for as long again is expected to save {gain:.1%} of the best time"


def failures_text(progress: Progress) -> str:
    """Counts by stage, or that there are none."""
    return ", ".join(f"{count} {stage}" for stage, count in sorted(progress.failures.items())) or "none"


def duration(seconds: float | None) -> str:
    """Hours, minutes or seconds, as one reads them."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def started_line(event: RunStarted) -> str:
    """What a run is about to do."""
    how = "" if event.measured else ": nothing is measured, candidates are compiled and ranked by an analytic model"
    return f"Tuning {plural(len(event.workloads), 'workload')} for {event.device.name} ({event.device.identity}){how}"


def ended_line(event: WorkloadFinished, place: str) -> str:
    """How a workload ended, which was the one at `place`."""
    reason = f" ({event.reason})" if event.reason else ""
    if event.record is None:
        return f"{place} {event.workload.key}: {event.status}{reason}"
    if event.record.time_ms is None:
        return f"{place} {event.workload.key}: {event.status}, {short_config(event.record)}{reason}"
    failed = sum(count for _, count in event.failures)
    figures = f"{event.record.time_ms:.4g} ms, {event.record.tflops or 0:.0f} TFLOP/s"
    tried = f", {event.trials} tried, {failed} failed" if event.trials else ""
    return f"{place} {event.workload.key}: {event.status}, {figures}{tried}, {short_config(event.record)}{reason}"


def print_report(finished: RunFinished, device: Device, database: str) -> None:
    """The closing table, reasons of what has no result, and where the records are."""
    rows = report_rows(finished.outcomes, device)
    chosen = [row for row in rows if row.ms is not None]
    if chosen:
        output.print_table(COLUMNS, [_cells(row) for row in chosen])
    for row in rows:
        if row.status in ("failed", "unsupported"):
            output.say(f"{row.status}: {row.workload}: {row.reason}")
    if any(row.source == "predicted" for row in chosen):
        output.say(
            f"Rows marked predicted were not measured: an analytic model ranked what compiles for {device.name}."
        )
    if finished.interrupted:
        output.say("Interrupted; the same command goes on from here.")
    output.say(f"Records: {database} ({device.identity}, {duration(finished.seconds)})")


def _cells(row: ReportRow) -> tuple[output.Cell, ...]:
    ratio = None if row.sdpa_ratio is None else f"{row.sdpa_ratio:.2f}x {row.sdpa_impl.removeprefix('sdpa-')}"
    return (
        row.workload,
        row.direction,
        row.features,
        row.config,
        row.ms,
        None if row.tflops is None else round(row.tflops),
        _percent(row.peak_share),
        ratio,
        None if row.hard_share is None else f"{row.hard_share:.2f}x",
        _percent(row.spread, digits=1),
        row.source if row.status != "skipped" else f"{row.source} before",
    )


def _percent(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else f"{value:.{digits}%}"


def _event_line(event: Event, progress: Progress) -> str | None:
    """The line that announces an event, None for those that only move the figures."""
    if isinstance(event, RunStarted):
        return started_line(event)
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    if isinstance(event, WorkloadStarted):
        resumed = f", {event.resumed_trials} tried before" if event.resumed_trials else ""
        place = f"[{progress.ended + 1}/{progress.total}]"
        return f"{place} {event.workload.key}: {event.candidates} candidates{resumed}, left {duration(progress.left_s)}"
    if isinstance(event, FinalsStarted):
        return f"  {STAGES[event.stage]}: {len(event.configs)} configs, about {duration(event.expected_s)}"
    if isinstance(event, WorkloadFinished):
        return ended_line(event, f"[{progress.ended}/{progress.total}]")
    return None
