"""How much of the time each knob decides: Optuna's PED-ANOVA over the stored trials of a search.

PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023) compares how the values of a knob are distributed among the best
trials and among all of them. It needs neither scikit-learn nor a model of the times, and says nothing of a knob that a
search left as it was.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import optuna

from flashgen.core.config import Config
from flashgen.report.contents import Search
from flashgen.tuning.quiet import Quiet

LEAST_TRIALS = 20
"""Measured trials of a family in one search; of fewer nothing can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """The mean share of a knob over so many searches of a family in which it took several values."""

    family: str
    knob: str
    share: float
    searches: int


def importances(searches: Iterable[Search]) -> tuple[Importance, ...]:
    """The shares of all knobs, by family and the largest first; empty where no search is long enough."""
    shares: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for search in searches:
        by_family: defaultdict[str, list[tuple[Config, float]]] = defaultdict(list)
        for trial, value in search.measured:
            by_family[trial.config.family].append((trial.config, value))
        for family, tried in by_family.items():
            for knob, share in _shares(tried).items():
                shares[family, knob].append(share)
    found = [
        Importance(family=family, knob=knob, share=statistics.mean(values), searches=len(values))
        for (family, knob), values in shares.items()
    ]
    return tuple(sorted(found, key=lambda each: (each.family, -each.share, each.knob)))


def _shares(tried: list[tuple[Config, float]]) -> dict[str, float]:
    if (
        len(tried) < LEAST_TRIALS or len({value for _, value in tried}) == 1
    ):  # where all took equally long, none decides
        return {}
    knobs = [dict(config.knobs) for config, _ in tried]
    values = {name: tuple(sorted({each[name] for each in knobs}, key=str)) for name in knobs[0]}
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(choices)
        for name, choices in values.items()
        if len(choices) > 1
    }
    if not distributions:
        return {}
    with Quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(direction="minimize")
        study.add_trials(
            optuna.trial.create_trial(
                params={name: each[name] for name in distributions},
                distributions=distributions,
                value=math.log(value),
            )
            for each, (_, value) in zip(knobs, tried, strict=True)
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(study, evaluator=evaluator)
