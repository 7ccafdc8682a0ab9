"""A replay table as the answer to a search: what a config takes, when it is known, and how far from the best it is.

The search space is the table: a config that it lacks is in no space, so nothing can ask for it. What was measured is
told as a search tells itself, its times levelled by the reference kernel; the right answer is that, or of those that
raced the time in their race. Seconds pass as they did when the table was measured: kernels are compiled ahead by a pool
of processes, and one GPU takes them in the order in which they were asked for.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement, TuningRecord
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.context import Options, lookahead
from flashgen.tuning.lattice import FamilySpace
from flashgen.tuning.regrets import levelled, right_ms
from flashgen.tuning.seed_lists import Lists, generated
from flashgen.tuning.starts import Start, starting_points

JOBS = 15
"""Processes that compile: those of a machine with 16 CPUs."""

Outcome = Measurement | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a table knows of a config: what a search is told, the right time, and the seconds until that was known."""

    outcome: Outcome
    right_ms: float | None
    compile_s: float
    evaluate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The space of a table with all answers."""

    name: str
    workload: Workload
    device: Device
    candidates: Candidates
    answers: Mapping[Config, Answer]

    @classmethod
    def of(cls, log: SearchLog) -> Table:
        """The table that a search is, of the configs that are valid today.

        Raises:
            ValueError: nobody wrote down what it was a search for, or no config of today has a time.
        """
        if log.search is None:
            raise ValueError("a table names its workload and its device, and this one does not")
        search = log.search
        names = str(dict(search.settings).get("families", "")).split()
        whole = Candidates.of(search.workload, search.device, tuple(names))
        answers = _answers(log)
        spaces = (replace(space, configs=tuple(c for c in space.configs if c in answers)) for space in whole.spaces)
        candidates = replace(whole, spaces=tuple(space for space in spaces if space.configs))
        valid = {config: answers[config] for space in candidates.spaces for config in space.configs}
        if not any(answer.right_ms for answer in valid.values()):
            raise ValueError(f"a table has a time of some config of today, and that of {search.workload.key} has none")
        return cls(
            name=search.workload.key,
            workload=search.workload,
            device=search.device,
            candidates=candidates,
            answers=valid,
        )

    @property
    def spaces(self) -> tuple[FamilySpace, ...]:
        """The families, each with the configs that the table has."""
        return self.candidates.spaces

    @property
    def best_ms(self) -> float:
        """The time of the best config."""
        return min(answer.right_ms for answer in self.answers.values() if answer.right_ms)

    @property
    def worst_ms(self) -> float:
        """The time of the slowest config: what who has tried none that works is said to have."""
        return max(answer.right_ms for answer in self.answers.values() if answer.right_ms)

    def starts(self, records: Sequence[TuningRecord] = (), lists: Lists = generated) -> list[Start]:
        """What a search tries first, without the workload's own records, as far as the table has it."""
        names = {space.family for space in self.spaces}
        known = [each for each in records if each.workload != self.workload and each.config.family in names]
        found = starting_points(self.candidates, self.workload, self.device, Options(), known=known, lists=lists)
        return [start for start in found if start[0] in self.answers]


class Asking(Protocol):
    """A search that is asked for one config after the other, and told what came out.

    `ahead` is how many it can be asked for before one is told; None means as many as `flashgen tune` compiles ahead.
    """

    @property
    def ahead(self) -> int | None:
        """See above."""
        ...

    def ask(self) -> Config | None:
        """The next config, which was not asked for before; None when nothing is left."""
        ...

    def tell(self, config: Config, outcome: Outcome) -> None:
        """What an asked config gave, in the order in which they were asked."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """After a trial: the seconds since the first one was done, and how much longer the best one so far takes."""

    seconds: float
    ratio: float


def replay(table: Table, search: Asking, *, trials: int, jobs: int = JOBS) -> list[Step]:
    """Let a search loose on a table for so many trials, on a machine where `jobs` processes compile."""
    free = [0.0] * jobs
    waiting: deque[tuple[Config, float]] = deque()
    most = lookahead(jobs) if search.ahead is None else search.ahead
    steps: list[Step] = []
    now = began = 0.0
    asked, best_ms = 0, table.worst_ms
    while True:
        while len(waiting) < most and asked < trials:
            config = search.ask()
            if config is None:
                break
            asked += 1
            ready = max(heapq.heappop(free), now) + table.answers[config].compile_s
            heapq.heappush(free, ready)
            waiting.append((config, ready))
        if not waiting:
            return steps
        config, ready = waiting.popleft()
        answer = table.answers[config]
        now = max(now, ready) + answer.evaluate_s
        began = began if steps else now
        best_ms = min(best_ms, answer.right_ms or math.inf)
        steps.append(Step(seconds=now - began, ratio=best_ms / table.best_ms))
        search.tell(config, answer.outcome)


def after_trials(steps: Sequence[Step], count: int) -> float:
    """The ratio after so many trials, or after the last one of a table that has fewer."""
    return steps[min(count, len(steps)) - 1].ratio


def after_seconds(steps: Sequence[Step], seconds: float) -> float | None:
    """The ratio after so many seconds; None if the replay was over by then and more trials might have found more."""
    if steps[-1].seconds < seconds and steps[-1].ratio > 1:
        return None
    return [step.ratio for step in steps if step.seconds <= seconds][-1]


def _answers(log: SearchLog) -> dict[Config, Answer]:
    told, right = levelled(log), right_ms(log)
    usual_s = _median(trial.compiled.compile_ms / 1e3 for trial in log.trials if trial.compiled)
    return {
        trial.config: Answer(
            outcome=told[trial.config],
            right_ms=right.get(trial.config),
            compile_s=trial.compiled.compile_ms / 1e3 if trial.compiled else usual_s,
            evaluate_s=trial.evaluate_s or 0.0,
        )
        for trial in log.trials
    }


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
