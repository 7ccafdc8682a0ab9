"""`Search`: which candidate to try next.

Each family of kernels has a study of Optuna, whose sampler is `tuning.sampler.ConfigSampler`: TPE, the surroundings of
the best, and chance.

Where a cost model that learns is given, it proposes most points: the best by what it expects of the unseen configs of
all families, from other searches and from the trials of this one. Every EXPLORE_EVERY-th point is one of the mix, which
needs no model to be right. docs/searches.md has what that is worth on replay tables.

Families of kernels have different knobs, and TPE does not model knobs that exist only under one choice of family, so
each family has a study of its own and the families share the budget. A family that stays far behind gets little of it.
A model knows all families before any has a trial, so that where one proposes, the mix goes to the best family at once.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import optuna

from flashgen.core.config import Config
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure, Measurement, Trial
from flashgen.tuning.lattice import FamilySpace
from flashgen.tuning.quiet import Quiet
from flashgen.tuning.sampler import LOCAL_POOL, STARTUP_POINTS, ConfigSampler

BEHIND = math.log(1.15)
BEHIND_AFTER = 5
BEHIND_EVERY = 10
"""A family whose best of BEHIND_AFTER configs or more is so far (log of times) from the best of all does not catch up
in a budget of seconds: no more than every BEHIND_EVERY-th point of the mix is its own. What comes first and a model
expects to be as far behind waits until a trial of its family is nearer."""

EXPLORE_EVERY = 5
REFIT_EVERY = 5
"""Trials until a model learns again: a forest and what it expects of a space take some tenths of a second."""

MODEL_POOL = 4500
"""Unseen configs of all families together that a model is asked about, and the neighbours of the best beside them."""

FAILED_VALUE = 30.0
"""Objective of a failed candidate: log(time / ideal time) of a kernel 1e13 times too slow, far beyond any real one."""

FIXED = ("default", "incumbent")
"""Sources of what is tried first, whatever a model expects."""

NEAREST_FIRST = 2
"""Configs of the nearest records that follow them: a model of many workloads knows less of those that are alike."""

MIX = ("local", "random", "sampler")
"""Sources of what needs no model: the sampler's."""

_CONSTRAINT = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A config to try and where it came from: one of `core.record.SOURCES`."""

    config: Config
    source: str


class Model(Protocol):
    """What candidates are expected to take."""

    def expected(
        self, configs: Sequence[Config], told: Sequence[tuple[Config, float | None]]
    ) -> Sequence[float] | None:
        """The logarithm of the time of each config over that of the best one; None while too little is known.

        Args:
            configs: candidates.
            told: trials, each with the logarithm of its time in some unit; None where it failed.
        """
        ...


class Search:
    """Proposes candidates of one or more kernel families for one workload, each at most once.

    The sequence is a pure function of the arguments and of what was told: a search rebuilt from the trials of a
    stopped one goes on exactly as that one would have. `ask` may run ahead of `tell` by any number of proposals.

    Args:
        spaces: the valid set of each family that applies.
        first: configs to try before all others, with their source; those outside the valid sets are left out.
        scale_ms: the time that counts as 1, such as the workload's ideal time.
        seed: chooses the sequence; equal seeds give equal sequences.
        name: the specialization's key, so that its workloads share one order of random points.
        trials: earlier trials of the same workload, which are told and never asked again.
        model: proposes most points; None leaves all to the sampler. A model that knows enough before the first trial
            also puts `first` in order, behind the default, the incumbent and the nearest records.

    Raises:
        TuningError: there is no candidate at all, or `scale_ms` is not a positive number.
    """

    def __init__(
        self,
        spaces: Sequence[FamilySpace],
        *,
        first: Iterable[tuple[Config, str]] = (),
        scale_ms: float = 1.0,
        seed: int = 0,
        name: str = "",
        trials: Iterable[Trial] = (),
        model: Model | None = None,
    ) -> None:
        if not any(space.configs for space in spaces):
            raise TuningError(f"a search needs at least one candidate, got none for {name or 'the workload'}")
        if not 0 < scale_ms < math.inf:
            raise TuningError(f"scale_ms must be a finite number above 0, got {scale_ms}")
        self._scale_ms = scale_ms
        self._families = {
            space.family: _FamilyStudy(space, zlib.crc32(f"{seed}/{name}/{space.family}".encode()))
            for space in spaces
            if space.configs
        }
        self._first = [
            Proposal(config=config, source=source)
            for config, source in first
            if config.family in self._families and self._families[config.family].has(config)
        ]
        self._model = model
        self._told: list[tuple[Config, float | None]] = []
        self._liked: list[Config] = []
        self._learned_from = -1
        self._mixed = 0
        self._doubted: frozenset[Config] = frozenset()
        self._first = self._in_order(self._first)
        for trial in trials:
            family = self._families.get(trial.config.family)
            if family is not None and family.is_unseen(trial.config):
                family.add(trial.config)
                self._mixed += trial.source in MIX
                self.tell(trial.config, trial.outcome)

    @property
    def size(self) -> int:
        """Candidates in all valid sets together."""
        return sum(family.size for family in self._families.values())

    @property
    def remaining(self) -> int:
        """Candidates that were neither asked nor told."""
        return sum(family.remaining for family in self._families.values())

    def ask(self) -> Proposal | None:
        """The next candidate, or None when every one was asked."""
        self._first = [p for p in self._first if self._families[p.config.family].is_unseen(p.config)]
        best = min(family.best for family in self._families.values())
        for position, proposal in enumerate(self._first):
            family = self._families[proposal.config.family]
            waits = proposal.config in self._doubted and not family.is_near(best)
            if not waits and not family.is_behind(best):
                family.add(proposal.config)
                del self._first[position]
                return proposal
        turn = sum(family.asked for family in self._families.values()) % EXPLORE_EVERY
        liked = self._most_liked(self._model) if self._model is not None else None
        if liked is not None and turn < EXPLORE_EVERY - 1:
            self._families[liked.family].add(liked)
            return Proposal(config=liked, source="learned")
        chosen = self._next_family(is_led=liked is not None)
        if chosen is None:
            return None
        self._mixed += 1
        return chosen.propose()

    def demand(self, config: Config, source: str) -> Proposal | None:
        """A certain candidate, whatever the next one is; None where it is none, or was asked before."""
        family = self._families.get(config.family)
        if family is None or not family.has(config) or not family.is_unseen(config):
            return None
        family.add(config)
        return Proposal(config=config, source=source)

    def tell(self, config: Config, outcome: Measurement | Failure) -> None:
        """Report what came out of an asked candidate.

        Raises:
            TuningError: the candidate was not asked, or was told before.
        """
        family = self._families.get(config.family)
        if family is None or not family.is_pending(config):
            raise TuningError(f"only a candidate that was asked can be told, and once, got {config}")
        value = self._value(outcome)
        family.tell(config, value)
        self._told.append((config, value))

    def _in_order(self, first: list[Proposal]) -> list[Proposal]:
        """Those that need no model, then what the model expects to be best; as given where it knows nothing."""
        near = [proposal for proposal in first if proposal.source == "neighbour"]
        fixed = [*(proposal for proposal in first if proposal.source in FIXED), *near[:NEAREST_FIRST]]
        others = [proposal for proposal in first if proposal not in fixed]
        configs = [each.config for each in (*fixed, *others)]
        known = self._model.expected(configs, ()) if self._model and others else None
        if known is None:
            return first
        expected, limit = known[len(fixed) :], min(known) + BEHIND
        doubted = {each.config for each, far in zip(others, expected, strict=True) if far > limit}
        self._doubted = frozenset(doubted.difference(each.config for each in fixed))  # a list may have a default, too
        ranked = sorted(range(len(others)), key=lambda place: (expected[place], place))
        return [*fixed, *(others[place] for place in ranked)]

    def _most_liked(self, model: Model) -> Config | None:
        """The unseen config that the model expects most of, or None while it expects nothing.

        It has learned from a multiple of REFIT_EVERY trials, so that a resumed search knows as much as the stopped one.
        """
        known = len(self._told) // REFIT_EVERY * REFIT_EVERY
        if known != self._learned_from or not self._liked:
            self._learned_from = known
            told = self._told[:known]
            times = sorted((value, place) for place, (_, value) in enumerate(told) if value is not None)
            best = [told[place][0] for _, place in times]
            most = MODEL_POOL // len(self._families)
            pool = [config for family in self._families.values() for config in family.pool(best, most)]
            expected = model.expected(pool, told)
            ranked = [] if expected is None else sorted(range(len(pool)), key=lambda place: (expected[place], place))
            self._liked = [pool[place] for place in reversed(ranked)]
        while self._liked and not self._families[self._liked[-1].family].is_unseen(self._liked[-1]):
            self._liked.pop()
        return self._liked[-1] if self._liked else None

    def _value(self, outcome: Measurement | Failure) -> float | None:
        return None if isinstance(outcome, Failure) else math.log(outcome.median_ms / self._scale_ms)

    def _next_family(self, *, is_led: bool) -> _FamilyStudy | None:
        """Two of three points go to the family of the best config so far, the third to the least tried one.

        Families that are far behind share every tenth. Where a model proposes the others (`is_led`), these are points
        of the mix: of all points it has every fifth, which would meet some of these turns always and others never. Nor
        do they wait there until each family was tried: the least tried one had all of them in searches of 25 trials.
        """
        asked = self._mixed + 1 if is_led else sum(family.asked for family in self._families.values())
        open_families = [family for family in self._families.values() if family.remaining]
        best = min(family.best for family in self._families.values())
        behind = [family for family in open_families if family.is_behind(best)]
        if behind and asked % BEHIND_EVERY == 0:
            return min(behind, key=lambda family: family.asked)
        open_families = [family for family in open_families if family not in behind] or behind
        if not open_families:
            return None
        started = is_led or all(family.asked >= STARTUP_POINTS for family in open_families)
        if started and (asked if is_led else sum(family.asked for family in open_families)) % 3:
            return min(open_families, key=lambda family: family.best)
        return min(open_families, key=lambda family: family.asked)


class _FamilyStudy:
    """One optuna study in memory over the valid set of one family."""

    def __init__(self, space: FamilySpace, seed: int) -> None:
        self._family = space.family
        self._sampler = ConfigSampler(space, seed)
        self._pending: dict[Config, optuna.Trial] = {}
        with Quiet():
            self._study = optuna.create_study(direction="minimize", sampler=self._sampler)

    @property
    def size(self) -> int:
        return len(self._sampler.lattice.points)

    @property
    def remaining(self) -> int:
        return len(self._sampler.unseen)

    @property
    def asked(self) -> int:
        return self.size - self.remaining

    @property
    def best(self) -> float:
        return min(self._sampler.told)[0] if self._sampler.told else math.inf

    def is_behind(self, best: float) -> bool:
        """Whether this family's best is far from `best`, after a fair number of tries."""
        return self.asked - len(self._pending) >= BEHIND_AFTER and self.best - best > BEHIND

    def is_near(self, best: float) -> bool:
        """Whether one of its trials is not far from `best`."""
        return bool(self._sampler.told) and self.best - best <= BEHIND

    def has(self, config: Config) -> bool:
        return config in self._sampler.lattice.points

    def is_unseen(self, config: Config) -> bool:
        return config in self._sampler.unseen

    def is_pending(self, config: Config) -> bool:
        return config in self._pending

    def add(self, config: Config) -> None:
        """Make `config` a running trial of the study."""
        with Quiet():
            self._study.enqueue_trial(dict(config.knobs))
        self._ask()

    def tell(self, config: Config, value: float | None) -> None:
        """Finish a running trial; None is a failure: an infeasible point that TPE learns from, which FAIL is not."""
        trial = self._pending.pop(config)
        with Quiet():
            trial.set_constraint(_CONSTRAINT, 0.0 if value is not None else 1.0)
            self._study.tell(trial, FAILED_VALUE if value is None else value)

    def propose(self) -> Proposal:
        """A point of the sampler; the valid set must have unseen ones."""
        return Proposal(config=self._ask(), source=self._sampler.source)

    def pool(self, best: Iterable[Config], most: int) -> list[Config]:
        """Unseen configs: neighbours of the best ones of this family, and others in random order, as many as `most`."""
        own = [config for config in best if config.family == self._family]
        near = self._sampler.near(own[:LOCAL_POOL])
        return list(dict.fromkeys([*near, *itertools.islice(self._sampler.unseen, most)]))

    def _ask(self) -> Config:
        with Quiet():
            trial = self._study.ask(self._sampler.distributions)
        config = Config.of(self._family, trial.params)
        self._sampler.unseen.pop(config, None)  # where every knob has one value, nothing was sampled
        self._pending[config] = trial
        return config
