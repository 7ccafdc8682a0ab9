"""The sampler as Optuna knows it: in studies of its own, with enqueued trials, constraints and storages."""

from __future__ import annotations

import statistics
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from flashgen.core.config import Config
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure
from flashgen.tuning.lattice import FamilySpace
from flashgen.tuning.quiet import Quiet
from flashgen.tuning.sampler import ConfigSampler
from tests.tiers import EXHAUSTIVE
from tests.tuning.spaces import KNOBS, outcome, space, time_ms

SPACE = space()


def objective(trial: optuna.Trial) -> float:
    """As a user of Optuna writes it: each knob by its name."""
    config = Config.of(SPACE.family, {knob.name: trial.suggest_categorical(knob.name, knob.values) for knob in KNOBS})
    found = outcome(config)
    trial.set_constraint("failed", float(isinstance(found, Failure)))
    return 30.0 if isinstance(found, Failure) else found.median_ms


def study(sampler: optuna.samplers.BaseSampler, trials: int, **stored: object) -> optuna.Study:
    with Quiet():
        made = optuna.create_study(sampler=sampler, **stored)  # type: ignore[arg-type]
        made.optimize(objective, n_trials=trials)
    return made


def configs(made: optuna.Study) -> list[Config]:
    return [Config.of(SPACE.family, trial.params) for trial in made.trials]


def best_ms(made: optuna.Study) -> float:
    return min(time_ms(config) for config in configs(made) if not isinstance(outcome(config), Failure))


@EXHAUSTIVE
def test_a_study_of_optuna_has_valid_configs_alone_each_once_and_better_than_chance() -> None:
    found = [study(ConfigSampler(SPACE, seed), 60) for seed in range(4)]
    for made in found:
        assert len(set(configs(made))) == 60
        assert set(configs(made)) <= set(SPACE.configs)
    with Quiet():
        random = [study(optuna.samplers.RandomSampler(seed=seed), 60) for seed in range(4)]
    assert statistics.fmean(map(best_ms, found)) < 0.95 * statistics.fmean(map(best_ms, random))


@pytest.mark.parametrize("seed", [-100, 2**32 - 20])
def test_any_seed_serves_and_not_those_of_numpy_alone(seed: int) -> None:
    assert len(set(configs(study(ConfigSampler(SPACE, seed), 40)))) == 40


def test_failures_are_not_among_the_best_and_an_enqueued_config_is_not_asked_again() -> None:
    sampler = ConfigSampler(SPACE, 0)
    with Quiet():
        made = optuna.create_study(sampler=sampler)
        made.enqueue_trial(dict(SPACE.configs[7].knobs))
        made.optimize(objective, n_trials=20)
    assert configs(made)[0] == SPACE.configs[7]
    assert len(sampler.unseen) == len(SPACE.configs) - 20
    failed = {config for config in configs(made) if isinstance(outcome(config), Failure)}
    assert failed
    assert {config for _, _, config in sampler.told} == set(configs(made)) - failed


def test_a_study_in_a_storage_goes_on_with_a_sampler_of_its_trials(tmp_path: Path) -> None:
    whole = study(ConfigSampler(SPACE, 5), 40)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "studies.log")))
    for _ in range(2):
        half = study(ConfigSampler(SPACE, 5), 20, storage=storage, study_name="s", load_if_exists=True)
    assert configs(half) == configs(whole)


def test_tpe_models_the_knobs_that_it_would_infer_of_each_study_in_turn() -> None:
    sampler, tpe = ConfigSampler(SPACE, 1), optuna.samplers.TPESampler
    with Quiet():
        made, older = study(sampler, 20), study(optuna.samplers.RandomSampler(seed=0), 3)
        older.optimize(lambda trial: trial.suggest_float("another", 0.0, 1.0), n_trials=1)
        for one in (made, older, made):
            inferred = tpe().infer_relative_search_space(one, one.trials[-1])
            assert list(sampler._tried(one).items()) == list(inferred.items())
            assert bool(inferred) is (one is made)
            one.tell(one.ask(sampler.distributions if one is made else {}), state=optuna.trial.TrialState.FAIL)


def test_misuse_is_refused() -> None:
    few = FamilySpace(family=SPACE.family, knobs=SPACE.knobs, configs=SPACE.configs[:3])
    with Quiet():
        made = optuna.create_study(sampler=ConfigSampler(few, 0))
        asked = [made.ask(ConfigSampler(few, 0).distributions).params for _ in range(3)]
        assert {Config.of(few.family, params) for params in asked} == set(few.configs)
        with pytest.raises(TuningError, match="all 3 were"):
            made.ask(ConfigSampler(few, 0).distributions)
        other = optuna.create_study(sampler=ConfigSampler(few, 0))
        with pytest.raises(TuningError, match="got dropout"):
            other.ask().suggest_float("dropout", 0.0, 1.0)
