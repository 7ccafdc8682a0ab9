"""What all parts of one tuning run share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flashgen.core.checks import check_fields, instance, items, text
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.history import Origin, RunnerUp
from flashgen.core.record import Limits, TuningRecord, Versions
from flashgen.db.server import ServerStore
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import Compiler
from flashgen.tuning.events import OnEvent
from flashgen.tuning.finals import Finals
from flashgen.tuning.learned_cost import LearnedCost
from flashgen.tuning.variations import Variation

AnyStore = Store | ServerStore
"""Where a run resumes from and writes to: a file, or a database server that several runs share."""

MOST_AHEAD = 18
"""Candidates compiled ahead: a kernel takes 3 s to compile and a quarter of one to measure, so this many keep a GPU
busy. Replayed from nothing on the 12 tables, 17 of them have 1.012 of the best time after 5 s and 10 of them 1.018."""

Neighbours = Callable[[str], Iterable[TuningRecord]]
"""The known records of a class of workloads (`Specialization.workload_class`), of any device and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to search.

    Attributes:
        seed: equal seeds, budgets in trials and times give equal runs.
        retune: search again where a current record exists.
        lookahead: candidates that are compiled ahead of the one that is measured.
        finals: windows and rounds of the last comparisons.
        neighbours: how many configs of the nearest records are tried after the default.
        seed_configs: how many configs that the analytic model likes best are tried after those.
        families: the kernel families that are searched; none named means all.
        reverify: time so many configs of a record again that is not current, its own and the best known rivals, and
            search for none; None searches.
        vary: what is changed in the config of a record that is timed again: the results take part, before its rivals.
            A record that has met all of them is left alone.
        until: end a search when going on is expected to save less than this share of the best time
            (`tuning.expected`); None ends it by its budget alone.
        from_nothing: try no default, list, neighbour or model's choice first, and learn from no other trial of this
            device: what the search finds by itself. A record of the own database is tried all the same, since no search
            replaces it unraced.
    """

    seed: int = 0
    retune: bool = False
    lookahead: int = 4
    finals: Finals = field(default_factory=Finals)
    neighbours: int = 4
    seed_configs: int = 6
    families: tuple[str, ...] = ()
    from_nothing: bool = False
    reverify: int | None = None
    vary: tuple[Variation, ...] = ()
    until: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, TuningError)
        instance("finals", self.finals, Finals, TuningError)
        for family in items("families", self.families, TuningError):
            text("a family", family, TuningError)
        if self.lookahead < 1:
            raise TuningError(f"at least 1 candidate is compiled ahead, got {self.lookahead}")
        if self.until is not None and not 0 < self.until < 1:
            raise TuningError(f"a search ends by itself below a share of the time between 0 and 1, got {self.until}")
        if self.reverify is not None and self.reverify < 1:
            raise TuningError(f"at least 1 config of a record is timed again, got {self.reverify}")
        variations = items("variations", self.vary, TuningError)
        for variation in variations:
            instance("a variation", variation, Variation, TuningError)
        if variations and self.reverify is None:
            raise TuningError("configs of records are varied where records are timed again; a search varies all knobs")
        if min(self.neighbours, self.seed_configs) < 0:
            raise TuningError(f"counts of an options value are at least 0, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One run: its device, where results go, who compiles, what may be spent, and who is told.

    `run` is the id of the run and `host` the name of the machine that measures, for the history of its records.
    `limits` are those of its card, as far as they are known. `learned` is what is known of other searches, whose model
    proposes candidates; None leaves that to the sampler.
    """

    device: Device
    versions: Versions
    store: AnyStore
    compiler: Compiler
    budget: Budget
    options: Options
    neighbours: Neighbours
    emit: OnEvent
    clock: Callable[[], float] = time.monotonic
    run: str = ""
    host: str = ""
    limits: Limits = field(default_factory=Limits)
    learned: LearnedCost | None = None

    def origin(self, runners_up: tuple[RunnerUp, ...] = ()) -> Origin:
        """Who makes a record in this run; `runners_up` are the other configs of its last race."""
        return Origin(
            run=self.run, host=self.host, seed=self.options.seed, budget=str(self.budget), runners_up=runners_up
        )


def lookahead(jobs: int) -> int:
    """How many candidates ahead so many compile processes work."""
    return min(jobs + 2, MOST_AHEAD)
