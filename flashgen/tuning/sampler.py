"""`ConfigSampler`: an Optuna sampler over the valid configs of one kernel family, each of which it proposes once.

It is a mix: Optuna's multivariate TPE over categorical knobs, whose wish is snapped to the nearest unseen valid config;
a share of random points; and every LOCAL_EVERY-th point is an unseen neighbour of one of the best. Replayed on
brute-forced spaces this mix did as well as any sampler alone and was not trapped on the rugged one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from flashgen.core.config import Config
from flashgen.core.errors import TuningError
from flashgen.tuning.lattice import FamilySpace, Lattice

STARTUP_POINTS = 10
"""Random points of a family before TPE has something to model."""

RANDOM_SHARE = 0.1
LOCAL_EVERY = 3
LOCAL_POOL = 5
"""Every LOCAL_EVERY-th point is an unseen neighbour of one of the LOCAL_POOL best configs."""

SEEDS = 2**32
"""How many seeds NumPy knows, from 0 on; a search may have any integer."""


class ConfigSampler(optuna.samplers.BaseSampler):
    """Samples knobs together, for `study.ask(sampler.distributions)` or an objective that suggests each by its name.

    A trial that broke a constraint teaches TPE where not to look, and none of its neighbours is tried for it. A point
    depends on the seed and on what was asked and told, so that a study that is rebuilt from its trials goes on alike.

    Attributes:
        distributions: of each knob.
        lattice: the valid configs.
        unseen: those that were not asked, in random order.
        told: the objective of each that succeeded, its place, and the config.
        source: where the last point came from: `local`, `random` or `sampler`.
    """

    def __init__(self, space: FamilySpace, seed: int) -> None:
        """Equal spaces and seeds give equal points."""
        self.distributions: dict[str, BaseDistribution] = {
            knob.name: CategoricalDistribution(knob.values) for knob in space.knobs
        }
        self.lattice = Lattice(space)
        # one order of random points for all workloads of a specialization: what one compiled, the others find ready
        self.unseen = dict.fromkeys(random.Random(seed).sample(space.configs, len(space.configs)))
        self.told: list[tuple[float, int, Config]] = []
        self.source = "random"
        self._family, self._seed, self._has_begun = space.family, seed, False
        self._common: tuple[optuna.Study, optuna.search_space.IntersectionSearchSpace] | None = None

    def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        """A config that was enqueued is seen, and so is what the study had before this sampler."""
        if not self._has_begun:
            self._has_begun = True
            for each in study.get_trials(deepcopy=False):
                if each.params.keys() == self.distributions.keys():
                    self.unseen.pop(Config.of(self._family, each.params), None)
                    self.after_trial(study, each, each.state, each.values)
        fixed = trial.system_attrs.get("fixed_params")
        if fixed:
            self.unseen.pop(Config.of(self._family, fixed), None)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All knobs: one alone says nothing."""
        return self.distributions

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A valid config by the mix of the module's docstring.

        Raises:
            TuningError: every one was asked.
        """
        if not self.unseen:
            raise TuningError(f"each config is asked once, and all {len(self.lattice.points)} were")
        turn = len(self.lattice.points) - len(self.unseen)
        chance = random.Random(self._seed + turn)  # of this turn alone, so that a resumed search draws the same
        config, self.source = self._next(study, trial, turn, chance)
        del self.unseen[config]
        return dict(config.knobs)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Nothing is sampled by itself.

        Raises:
            TuningError: always.
        """
        raise TuningError(f"parameters are the knobs of {self._family} with all their values, got {param_name}")

    def after_trial(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        state: optuna.trial.TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Learn which configs are the best."""
        if state == optuna.trial.TrialState.COMPLETE and values and max(trial.constraints.values(), default=0.0) <= 0:
            self.told.append((values[0], len(self.told), Config.of(self._family, trial.params)))

    def near(self, best: Iterable[Config]) -> list[Config]:
        """The unseen neighbours of these."""
        found = dict.fromkeys(itertools.chain.from_iterable(self.lattice.neighbours(config) for config in best))
        return [config for config in found if config in self.unseen]

    def _next(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, turn: int, chance: random.Random
    ) -> tuple[Config, str]:
        if turn % LOCAL_EVERY == LOCAL_EVERY - 1:
            neighbours = self.near(config for _, _, config in sorted(self.told)[:LOCAL_POOL])
            if neighbours:
                return chance.choice(neighbours), "local"
        if len(self.told) < STARTUP_POINTS or chance.random() < RANDOM_SHARE:
            return next(iter(self.unseen)), "random"
        tpe = optuna.samplers.TPESampler(seed=(self._seed + turn) % SEEDS, n_startup_trials=STARTUP_POINTS)
        found = tpe.sample_relative(study, trial, self._tried(study))
        wanted = self._whole(found)
        return (wanted if wanted in self.unseen else self.lattice.nearest(wanted, self.unseen)), "sampler"

    def _tried(self, study: optuna.Study) -> dict[str, BaseDistribution]:
        """What all trials have and what has a choice, as TPE infers it, a new one from every trial again."""
        if self._common is None or self._common[0] is not study:
            self._common = study, optuna.search_space.IntersectionSearchSpace(include_pruned=True)
        common = self._common[1].calculate(study, use_cache=True)
        return {name: distribution for name, distribution in common.items() if not distribution.single()}

    def _whole(self, found: Mapping[str, Any]) -> Config:
        """With the knobs that have one value, which TPE leaves out."""
        only = {name: each.choices[0] for name, each in self.distributions.items() if name not in found}  # type: ignore[attr-defined]
        return Config.of(self._family, {**only, **found})
