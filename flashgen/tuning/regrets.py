"""How far behind the best each config is on a workload: from tables and searches, and from records that name winners.

What is learned from other runs reads this: lists of configs to begin with (`tuning.learned_seeds`), and rules for calls
without a record (`tuning.learned_fallback`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashgen.codegen.families import successor
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure, Measurement, TuningRecord
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.measure.protocol import specialization
from flashgen.measure.scores import compared, least
from flashgen.tuning.levels import Levels

LEAST_CONFIGS = 16
"""Of a table that has no time of the record's winner."""

FAILED = math.inf
"""Of a config that was tried and has no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of one workload on one device.

    Attributes:
        workload: the workload.
        served: the config of its record; None where only tables know it.
        winner: the same as today's families have it.
        ratios: of each config that was tried its time over that of the best one; empty where no table says.
    """

    workload: Workload
    served: Config | None
    winner: Config | None
    ratios: Mapping[Config, float]

    def regret(self, config: Config) -> float | None:
        """The time of a config over that of the best one; 1 of the winner where none was timed, None if unknown."""
        found = self.ratios.get(config)
        if found is None and config == self.winner:
            return 1.0
        return found


def known_of(records: Iterable[TuningRecord], logs: Iterable[SearchLog], device: Device) -> list[Known]:
    """What records and tables know of each workload, in the order of their keys.

    Args:
        records: measured ones; those of other devices are left out.
        logs: tables and searches; several of one workload are joined by the configs that they share.
        device: where configs shall serve.

    Raises:
        TuningError: a table is of another device, or does not say of what it is.
    """
    served: dict[Workload, Config] = {}
    for record in records:
        if record.provenance == "measured" and device.may_use(record.device):
            served.setdefault(record.workload, record.config)
    winners = {workload: successor(config, specialization(workload)) for workload, config in served.items()}
    times: dict[Workload, list[dict[Config, float]]] = {}
    for log in logs:
        if log.search is None or not device.may_use(log.search.device):
            whose = "nobody knows which" if log.search is None else log.search.device.identity
            raise TuningError(f"tables to learn from are of {device.identity}, got one of {whose}")
        times.setdefault(log.search.workload, []).append(_tried(log))
    return [
        Known(
            workload=workload,
            served=served.get(workload),
            winner=winners.get(workload),
            ratios=_ratios(_joined(times.get(workload, [])), winners.get(workload)),
        )
        for workload in sorted({*served, *times}, key=lambda each: each.key)
    ]


def right_ms(log: SearchLog) -> dict[Config, float]:
    """The time of each config that has one: in short windows, levelled, or of those that raced that in their race.

    Those are times on normal data; of workloads with profiles of lengths what configs are compared by there.
    """
    return _with_races(log, _times_ms({c: m for c, m in levelled(log).items() if isinstance(m, Measurement)}))


def ratios_of(log: SearchLog) -> dict[Config, float]:
    """The time of each config that was tried over that of the best one, `FAILED` without one; empty if none has any."""
    return _over_best(_tried(log))


def levelled(log: SearchLog) -> dict[Config, Measurement | Failure]:
    """What each config of a search gave: the least of its windows, in the unit of the first session's clock."""
    levels, places = Levels(), {}
    for trial in log.trials:
        if isinstance(trial.outcome, Measurement) and trial.outcome.reference_ms is not None:
            places[trial.config] = levels.add(trial.outcome.reference_ms)
    factors = {config: levels.factor(place) for config, place in places.items()}
    return {
        trial.config: least(trial.outcome).times(factors.get(trial.config, 1.0))
        if isinstance(trial.outcome, Measurement)
        else trial.outcome
        for trial in log.trials
    }


def _times_ms(measured: Mapping[Config, Measurement]) -> dict[Config, float]:
    has_profiles = any(each.profile_times_ms for each in measured.values())
    return {config: each.median_ms for config, each in (compared(measured) if has_profiles else measured).items()}


def _with_races(log: SearchLog, short: Mapping[Config, float]) -> dict[Config, float]:
    """The times of those that raced, on normal data, in the unit of those in short windows."""
    raced = _times_ms({each.config: each.outcome for each in log.finalists if isinstance(each.outcome, Measurement)})
    both = [short[config] / time for config, time in raced.items() if config in short]
    unit = statistics.median(both) if both else 1.0
    return {**short, **{config: unit * time for config, time in raced.items() if config in short}}


def _tried(log: SearchLog) -> dict[Config, float]:
    times = right_ms(log)
    return {trial.config: times.get(trial.config, FAILED) for trial in log.trials}


def _joined(tables: Sequence[Mapping[Config, float]]) -> dict[Config, float]:
    """Several tables of one workload in the unit of the largest one; those that share no config with it are left out.

    Of a config that several have, the time of the largest table counts.
    """
    ordered = sorted(tables, key=len, reverse=True)
    found = dict(ordered[0]) if ordered else {}
    for table in ordered[1:]:
        shared = [found[config] / time for config, time in table.items() if time < FAILED > found.get(config, FAILED)]
        if shared:
            unit = statistics.median(shared)
            found = {**{config: unit * time for config, time in table.items()}, **found}
    return found


def _ratios(times: Mapping[Config, float], winner: Config | None) -> dict[Config, float]:
    """Empty where the best of so few configs may be far from the best there is."""
    if len(times) < LEAST_CONFIGS and times.get(winner, FAILED) == FAILED:  # type: ignore[arg-type]
        return {}
    return _over_best(times)


def _over_best(times: Mapping[Config, float]) -> dict[Config, float]:
    best = min(times.values(), default=FAILED)
    return {config: time / best for config, time in times.items()} if best < FAILED else {}
