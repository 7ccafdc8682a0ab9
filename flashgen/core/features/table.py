"""The table of features, and what follows from all of its rows together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.core.features.declaration import CallFacts, Feature, Gradient, Value
from flashgen.core.features.dropout import DROPOUT
from flashgen.core.features.functions import FUNCTIONS
from flashgen.core.features.pages import PAGES
from flashgen.core.features.positions import CAUSAL, Q_OFFSET, WINDOW
from flashgen.core.features.promises import DETERMINISTIC
from flashgen.core.features.score_tensors import BIAS, MASK
from flashgen.core.features.scores import ALIBI, SINKS, SOFTCAP
from flashgen.core.features.sequences import VARLEN
from flashgen.core.features.values import Features

FEATURES: tuple[Feature, ...] = (
    CAUSAL,
    WINDOW,
    SOFTCAP,
    ALIBI,
    SINKS,
    BIAS,
    MASK,
    FUNCTIONS,
    Q_OFFSET,
    VARLEN,
    PAGES,
    DETERMINISTIC,
    DROPOUT,
)
"""Every feature. The order is that of the ops' arguments and of the tokens in keys, so a new row stands last in its
group."""


def names() -> frozenset[str]:
    """The names of all features."""
    return frozenset(feature.name for feature in FEATURES)


def asked(value: object) -> tuple[Feature, ...]:
    """The features that a `Workload` or a `Specialization` asks for."""
    return tuple(feature for feature in FEATURES if feature.is_asked(value))


def given(features: Features) -> tuple[Feature, ...]:
    """The features that the arguments of a call bring."""
    return tuple(feature for feature in FEATURES if feature.is_in(features))


def values(*, trains: bool = False) -> tuple[Value, ...]:
    """The fields of `Features`; with `trains` those of features that have a backward pass."""
    return tuple(value for feature in FEATURES if feature.trains or not trains for value in feature.values)


def checked(features: Features, facts: CallFacts) -> Features:
    """The features of a call in the form that the slow path needs: bias and mask in four dimensions.

    Raises:
        WorkloadError: an argument breaks a rule; the message names the rule and the value.
    """
    changes: dict[str, Any] = {}
    for feature in FEATURES:
        changes |= feature.checked(features, facts)
    return replace(features, **changes)


def workload_fields(features: Features, facts: CallFacts) -> dict[str, Any]:
    """What the features of a call are in its `Workload`."""
    return {name: value for feature in FEATURES for name, value in feature.workload(features, facts).items()}


def specialization_fields(features: Features) -> dict[str, Any]:
    """What the features of a call are in its `Specialization` beside that."""
    return {name: value for feature in FEATURES for name, value in feature.specialization(features).items()}


def gradients() -> tuple[Gradient, ...]:
    """Gradients beside those of q, k and v, in the order in which backward passes return them: by kernels first."""
    found = [feature.gradient for feature in FEATURES if feature.gradient is not None]
    return tuple(sorted(found, key=lambda gradient: gradient.by != "kernel"))
