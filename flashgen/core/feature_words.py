"""The features of a workload in words, as tables and explanations name them."""

from __future__ import annotations

from flashgen.core.features.table import FEATURES
from flashgen.core.workload import Specialization, Workload

_IN_ORDER = sorted(FEATURES, key=lambda feature: not feature.first_words)


def feature_words(workload: Workload) -> tuple[str, ...]:
    """What a workload has beside plain attention; empty for plain attention.

    For example `("causal", "window 4095/0", "softcap", "sinks", "ALiBi", "bias", "key mask")`.
    """
    return tuple(word for feature in _IN_ORDER for word in feature.words(workload))


def specialization_words(spec: Specialization) -> tuple[str, ...]:
    """What of a specialization no workload says: `("offsets on the device",)`."""
    return tuple(word for feature in _IN_ORDER for word in feature.specialization_words(spec))


def describe(workload: Workload) -> str:
    """`feature_words` as one text, e.g. `causal, window 4095/0`; `plain` where there is none."""
    return ", ".join(feature_words(workload)) or "plain"
