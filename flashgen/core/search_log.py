"""What is kept of a search beside its trials: how it was asked for, and every race of its finals.

A search is named by its run, its workload and the identity of its device. No look-up reads any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement, Trial, Versions
from flashgen.core.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One search for one workload: who made it, with what, and on what kind of a machine.

    Attributes:
        workload: what was searched for.
        device: where it was measured.
        run: the id of the run, which all searches of one `flashgen tune` share, and the origins of its records.
        host: the name of the machine that measured.
        seed: of the search.
        budget: such as `20 s` or `40 trials`.
        candidates: configs in the valid sets of all families.
        settings: names of options and their values, such as how many neighbours were tried.
        versions: the software.
        state: what the driver said of the device at the start, such as `power_limit_w`.
        created: when it began, ISO 8601, UTC.
    """

    workload: Workload
    device: Device
    run: str
    host: str = ""
    seed: int | None = None
    budget: str = ""
    candidates: int = 0
    settings: tuple[tuple[str, KnobValue], ...] = ()
    versions: Versions = field(default_factory=Versions)
    state: tuple[tuple[str, float], ...] = ()
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """What one config did in one race of a search's finals.

    Attributes:
        workload: what was searched for.
        device: where it was measured.
        run: the id of the run.
        race: the number of the race in its search, from 1.
        stage: what the race was for: `near` the best in short windows, or the `last` one.
        config: the config.
        outcome: the times of its windows, those of one place of all rivals from the same round, or why it has none.
        created: when the race ended, ISO 8601, UTC.
    """

    workload: Workload
    device: Device
    run: str
    race: int
    stage: str
    config: Config
    outcome: Measurement | Failure
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLog:
    """All that is known of one search; `search` is None where nobody wrote it down, as before schema 0009.

    Attributes:
        search: how it was asked for.
        trials: its trials in their order.
        finalists: those of its races in the order of the races; of one race as they were named to it.
    """

    search: SearchRun | None
    trials: tuple[Trial, ...] = ()
    finalists: tuple[Finalist, ...] = ()
