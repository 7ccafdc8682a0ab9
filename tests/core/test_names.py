"""What was probably meant is named, and nothing where nothing is like it."""

from __future__ import annotations

import pytest

from flashgen.core.names import meant


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("casual", ["alibi", "causal"], "; did you mean causal?"),
        ("LLAMA-3.1", ["llama-3.1-8b", "gpt2"], "; did you mean llama-3.1-8b?"),
        ("portable-forward", ["portable_forward", "hopper_forward"], "; did you mean portable_forward?"),
        ("llama", ["gpt2", "llama-3.1-8b", "llama-3.1-70b"], "; did you mean llama-3.1-8b?"),
        ("ll", ["gpt2", "llama-3.1-8b"], ""),
        ("abacus", ["h100", "a100"], ""),
        ("", ["h100"], ""),
        ("h100", [], ""),
    ],
)
def test_the_likeliest_name_is_suggested(name: str, known: list[str], text: str) -> None:
    assert meant(name, known) == text
