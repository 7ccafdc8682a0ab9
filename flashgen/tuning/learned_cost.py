"""What candidates of a search are expected to take, learned from trials: those of other searches, and its own.

A forest of extremely randomised trees (Geurts, Ernst, Wehenkel, Machine Learning 63, 2006) of scikit-learn, which is an
extra, `flashgen[model]`. It learns how much longer a config takes than the best one of its workload, as a logarithm, so
that workloads of all sizes and devices of all speeds are told together; what fails counts as `FAILED`, so it learns
what is feasible as well. A search's own trials count `OWN_WEIGHT` times, and take over as there are more of them.

Without the package there is no model, and a search goes on as it did before.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashgen.codegen.families import family
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.nearest import distance, position
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.tuning.cost_inputs import Row, rows_of
from flashgen.tuning.regrets import ratios_of
from flashgen.tuning.sampler import SEEDS

FAILED = math.log(3)
"""The most that is learned of a config, also of one that failed: how bad it is beyond does not matter."""

OWN_WEIGHT = 3.0
TREES = 40
COLUMNS_A_SPLIT = 0.5
LEAST_ROWS = 8
"""Of trials together, before which nothing is expected."""

MOST_ROWS = 4000
"""Of other searches, the nearest first: a forest learns them in half a second."""

Told = tuple[Config, "float | None"]
"""A config and the logarithm of its time in some unit; None where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What one search or table teaches: rows of `cost_inputs`, and how far behind its best each config is."""

    workload: Workload
    device: Device
    rows: tuple[Row, ...]
    behind: tuple[float, ...]

    @classmethod
    def of(cls, log: SearchLog) -> Lesson | None:
        """None where nobody wrote down what was searched for, or no config has a time."""
        if log.search is None:
            return None
        workload, device = log.search.workload, log.search.device
        trials = tuple(t for t in log.trials if family(t.config.family).direction == workload.direction)
        ratios = ratios_of(replace(log, trials=trials))  # a file may hold trials that no search makes
        if not ratios:
            return None
        return cls(
            workload=workload,
            device=device,
            rows=tuple(rows_of(workload, device, list(ratios))),
            behind=tuple(min(math.log(ratio), FAILED) for ratio in ratios.values()),
        )


class LearnedCost:
    """The lessons of all searches that are known.

    Args:
        logs: tables and stored searches, of any device.
    """

    def __init__(self, logs: Iterable[SearchLog] = ()) -> None:
        self.lessons = tuple(lesson for lesson in map(Lesson.of, logs) if lesson is not None)

    def of(
        self,
        workload: Workload,
        device: Device,
        *,
        seed: int = 0,
        without_device: bool = False,
        without_workload: bool = False,
    ) -> WorkloadCost | None:
        """The model of one search; None where scikit-learn is not installed.

        Args:
            workload: what is searched for.
            device: where.
            seed: of the trees.
            without_device: nothing that was measured on this device counts.
            without_workload: nothing that was measured of this workload counts.
        """
        if not is_installed():
            return None
        here = position(workload)

        def far(lesson: Lesson) -> tuple[object, ...]:
            other = lesson.workload
            return other.direction != workload.direction, distance(position(other), here), other.key

        lessons = [
            lesson
            for lesson in sorted(self.lessons, key=far)
            if not (without_device and device.may_use(lesson.device))
            and not (without_workload and lesson.workload == workload)
        ]
        return WorkloadCost(workload, device, lessons, seed)


class WorkloadCost:
    """What the candidates of one search are expected to take."""

    def __init__(self, workload: Workload, device: Device, lessons: Sequence[Lesson], seed: int) -> None:
        self._workload, self._device, self._seed = workload, device, seed
        self._rows = [row for lesson in lessons for row in lesson.rows][:MOST_ROWS]
        self._behind = [behind for lesson in lessons for behind in lesson.behind][:MOST_ROWS]
        self._own: dict[Config, Row] = {}
        self._forest: tuple[tuple[Told, ...], Any] | None = None

    @property
    def size(self) -> int:
        """Trials of other searches that it has learned from."""
        return len(self._rows)

    def expected(self, configs: Sequence[Config], told: Sequence[Told]) -> list[float] | None:
        """The logarithm of the time of each config over that of the best one; None while too little is known.

        Args:
            configs: candidates.
            told: the search's own trials.
        """
        own = tuple(told) if any(value is not None for _, value in told) else ()
        if not configs or len(self._rows) + len(own) < LEAST_ROWS:
            return None
        if self._forest is None or self._forest[0] != own:  # a search asks about its starts, then about its space
            self._forest = own, self._learned(own)
        return [float(value) for value in self._forest[1].predict(self._of(configs))]

    def _learned(self, own: Sequence[Told]) -> Any:
        best = min((value for _, value in own if value is not None), default=0.0)
        behind = [FAILED if value is None else min(value - best, FAILED) for _, value in own]
        forest = _forest(self._seed)
        forest.fit(
            [*self._rows, *self._of([config for config, _ in own])],
            [*self._behind, *behind],
            sample_weight=[1.0] * len(self._rows) + [OWN_WEIGHT] * len(own),
        )
        return forest

    def _of(self, configs: Sequence[Config]) -> list[Row]:
        new = [config for config in configs if config not in self._own]
        self._own.update(zip(new, rows_of(self._workload, self._device, new), strict=True))
        return [self._own[config] for config in configs]


def is_installed() -> bool:
    """Whether there is a scikit-learn; it is not imported."""
    return importlib.util.find_spec("sklearn") is not None


def _forest(seed: int) -> Any:
    from sklearn.ensemble import ExtraTreesRegressor

    return ExtraTreesRegressor(TREES, max_features=COLUMNS_A_SPLIT, random_state=seed % SEEDS, n_jobs=1)
