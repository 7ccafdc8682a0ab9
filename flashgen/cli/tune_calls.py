"""`flashgen tune --from-calls`: what to tune is what a program was recorded to call."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flashgen.cli import output
from flashgen.cli.arguments import CommandLineError

if TYPE_CHECKING:
    from flashgen.tuning.budget import Budget
    from flashgen.tuning.events import RunFinished, RunStarted
    from flashgen.tuning.from_calls import Gain, Gains

EACH, ALL, MOST = "30s", "10m", "5m"
"""The budget of a workload, of all workloads of a file of calls, and of a search that stops by itself, where none is
given."""

COLUMNS = ("workload", "calls", "share before", "share now", "ms before", "ms now", "speedup")


def limits(budget: Budget) -> tuple[Budget, float]:
    """What each workload gets of a budget for all of them, and the seconds that it has.

    Raises:
        CommandLineError: it is in trials.
    """
    from flashgen.tuning.budget import Budget

    if budget.seconds is None:
        raise CommandLineError(f"with --from-calls a budget is a time for all workloads, like 10m, got {budget}")
    each = Budget.parse(EACH).seconds or 0.0
    return Budget(seconds=min(each, budget.seconds)), budget.seconds


def print_left(finished: RunFinished, begun: Iterable[RunStarted]) -> None:
    """That the time ended before some of a device's workloads; of an interrupted run more is said already."""
    total = sum(len(each.workloads) for each in begun if each.device == finished.device)
    left = total - len(finished.outcomes)
    if left and not finished.interrupted:
        output.say(f"The time ended before {left} of {total} workloads; the same command goes on with them.")


def print_gains(gains: Gains, finished: RunFinished, *, as_json: bool) -> None:
    """What the run gained for the program, by the times that it measured."""
    found = gains.of(finished)
    before, now = sum(one.total_before_ms for one in found), sum(one.total_after_ms for one in found)
    if as_json:
        rows = [{**_row(one), "is_measured": one.is_measured} for one in found]
        line = {"event": "gains", "workloads": rows, "before_ms": before, "now_ms": now}
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
        return
    if not found:
        output.say("No workload of the file was measured in this run: nothing was gained.")
        return
    output.say("")
    output.print_table(COLUMNS, [_cells(one, before, now) for one in found])
    estimated = sum(not one.is_measured for one in found)
    note = f" ({estimated} rows by the recording's estimate of before, marked ~)" if estimated else ""
    output.say(f"Attention of these calls: {before:.4g} ms before, {now:.4g} ms now, {before / now:.2f}x{note}.")


def _row(gain: Gain) -> dict[str, object]:
    return {
        "workload": gain.workload.key,
        "calls": gain.calls,
        "before_ms": gain.before_ms,
        "now_ms": gain.after_ms,
    }


def _cells(gain: Gain, before: float, now: float) -> tuple[output.Cell, ...]:
    mark = "" if gain.is_measured else "~"
    return (
        gain.workload.key,
        gain.calls,
        f"{gain.total_before_ms / before:.1%}",
        f"{gain.total_after_ms / now:.1%}",
        f"{mark}{gain.before_ms:.4g}",
        gain.after_ms,
        f"{mark}{gain.before_ms / gain.after_ms:.2f}x",
    )
