"""Problems one after the other: rows are on the disk before the next one begins, and a later run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.gpu_turns import has_others
from benchmarks.race import Result, lacked_memory
from benchmarks.results import ResultsFile, Row
from benchmarks.time_limit import TimeLimit

J = TypeVar("J")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is found of one problem.

    Attributes:
        rows: are written together.
        lines: for people.
        reasons: why an implementation has no row, by its name.
    """

    rows: Sequence[Row]
    lines: Sequence[str]
    reasons: dict[str, str]


def outcome_of(
    results: Sequence[Result],
    row_of: Callable[[Result], Row],
    line_of: Callable[[Result], str],
    *,
    reasons: bool = False,
) -> Outcome:
    """Of a race, with the trials of variants; with `reasons`, an implementation that has no time has a row as well."""
    return Outcome(
        rows=[row_of(result) for result in results if reasons or result.reason is None],
        lines=[line for result in results for line in (line_of(result), *(f"  {trial}" for trial in result.trials))],
        reasons={result.impl.name: result.reason for result in results if result.reason is not None},
    )


def work_off(
    jobs: Sequence[J],
    one: Callable[[J], Outcome],
    file: ResultsFile,
    limit: TimeLimit,
    say: Callable[[str], None],
    title: Callable[[J], str] = str,
) -> int:
    """Do one job after the other until the time limit, and what lacked memory beside other processes once more.

    Args:
        jobs: what is left to do.
        one: does it; nothing of it is written before.
        file: gets the rows.
        limit: when no further job is begun.
        say: is told how it goes.
        title: of a job, for people.

    Returns:
        The exit code: 0 is done, 4 if flashgen has no row of some job, 3 stopped at the time limit.
    """
    left, every, number, is_missing = deque(jobs), len(jobs), 0, False
    while left:
        if not limit.has_room():
            say(f"stopped at the time limit, {len(left)} workloads left: run again with --append")
            break
        job, number = left.popleft(), number + 1
        say(f"[{number}/{every}] {title(job)}  ({limit.elapsed_s:.0f} s)")
        found = one(job)
        limit.part_ended()
        if number <= every and has_others() and any(map(lacked_memory, found.reasons.values())):
            say("  memory is not enough beside other processes: done again in the end")
            left.append(job)
            continue
        file.write(found.rows)
        for line in found.lines:
            say(f"  {line}")
        is_missing = is_missing or "flashgen" in found.reasons
    say(f"{file.path}: {len(file.rows)} rows")
    return STOPPED if left else MISSING if is_missing else 0
