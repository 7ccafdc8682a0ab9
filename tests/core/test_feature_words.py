"""Features in words."""

from __future__ import annotations

import pytest

from flashgen.core.feature_words import describe, feature_words
from flashgen.core.workload import Workload


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("", "plain"),
        ("causal", "causal"),
        ("causal-wl4095", "causal, window 4095/0"),
        ("wl16-wr32", "window 16/32"),
        ("wr32", "window all/32"),
        ("wl0", "window 0/all"),
        ("causal-softcap-sink-alibi", "causal, softcap, sinks, ALiBi"),
        ("bias-keymask", "bias, key mask"),
        ("keybias-mask", "key bias, mask"),
        ("varlen-page16", "varlen, pages of 16"),
        ("bwd-causal", "causal"),
        ("bwd-sink-deterministic", "sinks, deterministic"),
    ],
)
def test_features_are_named(tokens: str, words: str) -> None:
    workload = Workload.parse("-".join(filter(None, ["b1-h2-s8192-d64", tokens])))
    assert describe(workload) == words
    assert (", ".join(feature_words(workload)) or "plain") == words
