"""Who takes part in a comparison of searches: ours in several forms, chance, and samplers of optuna by themselves.

A sampler alone has one study with a knob of the families and, below it, the knobs of each; numbers are places in their
order, words and flags are categories. What it proposes and the table lacks, or has given before, is moved to the
nearest config that is left, as `flashgen.tuning.search` does, and it is told that one's time for its own proposal.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optuna

from benchmarks.search_kernel_tuner import kernel_tuner_contestants
from benchmarks.search_replay import Asking, Outcome, Table
from flashgen.core.config import Config
from flashgen.core.record import Failure, TuningRecord
from flashgen.tuning.lattice import FamilySpace, Lattice
from flashgen.tuning.learned_cost import LearnedCost, is_installed
from flashgen.tuning.search import Model, Search

Maker = Callable[[Table, int], Asking]
"""Makes a contestant for a table and a seed."""

Starts = Callable[[Table], "Sequence[tuple[Config, str]]"]


class Ours:
    """`flashgen.tuning.search.Search`, as it is."""

    ahead: int | None = None

    def __init__(
        self, table: Table, seed: int, starts: Sequence[tuple[Config, str]], model: Model | None = None
    ) -> None:
        """Begin with `starts`; `model` proposes most of the others."""
        name = table.workload.specialization.key
        self._search = Search(table.spaces, first=starts, scale_ms=table.best_ms, seed=seed, name=name, model=model)

    def ask(self) -> Config | None:
        """See `Asking`."""
        proposal = self._search.ask()
        return proposal.config if proposal else None

    def tell(self, config: Config, outcome: Outcome) -> None:
        """See `Asking`."""
        self._search.tell(config, outcome)


class Chance:
    """Some configs in their order, then the others in random order."""

    ahead: int | None = None

    def __init__(self, table: Table, seed: int, starts: Sequence[tuple[Config, str]] = ()) -> None:
        """Begin with `starts`."""
        others = random.Random(seed).sample(list(table.answers), len(table.answers))
        self._left = iter(dict.fromkeys([*(config for config, _ in starts), *others]))

    def ask(self) -> Config | None:
        """See `Asking`."""
        return next(self._left, None)

    def tell(self, config: Config, outcome: Outcome) -> None:
        """It learns nothing."""


class Alone:
    """A sampler of optuna by itself."""

    ahead: int | None = None

    def __init__(self, table: Table, seed: int, sampler: Callable[[int], optuna.samplers.BaseSampler]) -> None:
        """`sampler` makes one for a seed."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optuna's notices about its own experimental parts
            self._study = optuna.create_study(sampler=sampler(seed))
        self._families = {space.family: _Numbered(space) for space in table.spaces}
        self._left = dict.fromkeys(table.answers)
        self._running: dict[Config, optuna.Trial] = {}

    def ask(self) -> Config | None:
        """See `Asking`."""
        open_families = [family for family, each in self._families.items() if each.left]
        if not open_families:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask()
            family = str(trial.suggest_categorical("family", list(self._families)))
            wished = self._families[family].suggest(trial)
        chosen = family if self._families[family].left else open_families[0]
        config = self._families[chosen].take(wished if chosen == family else None)
        self._running[config] = trial
        return config

    def tell(self, config: Config, outcome: Outcome) -> None:
        """See `Asking`; a failure is told as one."""
        trial = self._running.pop(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(outcome, Failure):
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(trial, outcome.median_ms)


class _Numbered:
    """The knobs of a family as numbers and categories, and its configs that were not given yet."""

    def __init__(self, space: FamilySpace) -> None:
        self._space = space
        self._lattice = Lattice(space)
        self.left = dict.fromkeys(space.configs)

    def suggest(self, trial: optuna.Trial) -> Config:
        values: dict[str, Any] = {}
        for knob in self._space.knobs:
            name = f"{self._space.family}.{knob.name}"
            if all(type(value) is int for value in knob.values) and len(knob.values) > 1:
                values[knob.name] = knob.values[trial.suggest_int(name, 0, len(knob.values) - 1)]
            else:
                values[knob.name] = trial.suggest_categorical(name, list(knob.values))
        return Config.of(self._space.family, values)

    def take(self, wished: Config | None) -> Config:
        """The config itself, or the nearest one that is left."""
        if wished is None:
            found = next(iter(self.left))
        else:
            found = wished if wished in self.left else self._lattice.nearest(wished, self.left)
        del self.left[found]
        return found


SAMPLERS: dict[str, tuple[Callable[[int], optuna.samplers.BaseSampler], tuple[str, ...]]] = {
    "optuna TPE": (lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True), ()),
    "optuna GP": (lambda seed: optuna.samplers.GPSampler(seed=seed), ("scipy", "torch")),
    "optuna CMA-ES": (
        lambda seed: optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
        ("cmaes",),
    ),
    "optuna NSGA-II": (lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=20), ()),
}
"""Each with the packages that it needs. NSGA-II has generations of 20, for 50 would all be random here."""


ELSEWHERE = {"Helion": "its searches take a kernel of its own with its own knobs, and no table of others"}


OTHER_DEVICE = "flashgen, other device"

WITH_MODEL = ("flashgen", "flashgen, model alone", OTHER_DEVICE, "flashgen, from nothing")
"""As it is; with neither lists nor records nor a default; the same where all that it has learned was measured on other
devices; and with nothing that was measured before."""


def _of_other_devices(table: Table, seed: int, lessons: LearnedCost | None) -> Ours:
    """What was measured on the device is left out; of others, all that is known, of the workload itself, too.

    Raises:
        ValueError: nothing of another device is known.
    """
    model = lessons and lessons.of(table.workload, table.device, seed=seed, without_device=True)
    if model is None or not model.size:
        raise ValueError(f"nothing is known that was not measured on {table.device.name}")
    return Ours(table, seed, (), model)


def contestants(
    records: Sequence[TuningRecord] = (), learned: LearnedCost | None = None
) -> tuple[dict[str, Maker], dict[str, str]]:
    """Everybody who can take part, by name, and of the others why not.

    Args:
        records: known ones, for the search that is told of the nearest; a workload's own are left out.
        learned: what the tables teach; what one teaches of its own workload is left out.
    """

    def ours(starts: Starts, lessons: LearnedCost | None = None) -> Maker:
        def make(table: Table, seed: int) -> Ours:
            model = lessons and lessons.of(table.workload, table.device, seed=seed, without_workload=True)
            return Ours(table, seed, starts(table), model)

        return make

    full, alone, elsewhere, nothing = WITH_MODEL
    found: dict[str, Maker] = {
        full: ours(lambda table: table.starts(records), learned),
        alone: ours(lambda table: (), learned),
        elsewhere: partial(_of_other_devices, lessons=learned),
        nothing: ours(lambda table: (), LearnedCost()),
        "sampler, lists and records": ours(lambda table: table.starts(records)),
        "sampler, lists": ours(lambda table: table.starts()),
        "sampler, default alone": ours(lambda table: [start for start in table.starts() if start[1] == "default"]),
        "sampler, from nothing": ours(lambda table: ()),
        "lists, then random": lambda table, seed: Chance(table, seed, table.starts()),
        "random": Chance,
    }
    absent: dict[str, str] = {}
    if learned is None or not is_installed():
        absent |= dict.fromkeys(WITH_MODEL, "no trials are known" if is_installed() else "sklearn is not installed")
        for name in WITH_MODEL:
            del found[name]
    if not records:
        absent["sampler, lists and records"] = "no records are known"
        del found["sampler, lists and records"]
    for name, (sampler, needed) in SAMPLERS.items():
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            absent[name] = f"{', '.join(missing)} is not installed"
        else:
            found[name] = partial(Alone, sampler=sampler)
    theirs, missing_too = kernel_tuner_contestants()
    return {**found, **theirs}, {**absent, **missing_too, **ELSEWHERE}
