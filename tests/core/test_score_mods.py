"""User functions: checked at birth, known by a digest of their source, and in a key without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.core.errors import WorkloadError
from flashgen.core.score_mods import DIGEST_LENGTH, ScoreMods, UserFunction
from flashgen.core.workload import Specialization, Workload

SOURCE = "def twice(score, b, h, q_idx, k_idx):\n    return 2 * score\n"
TWICE = UserFunction(name="twice", source=SOURCE)
EVEN = UserFunction(name="even", source="def even(b, h, q_idx, k_idx):\n    return k_idx % 2 == 0\n")
PLAIN = Workload.parse("b1-h2-s64-d64-causal")


def test_a_digest_follows_the_source() -> None:
    assert len(TWICE.digest) == DIGEST_LENGTH
    assert int(TWICE.digest, 16) >= 0
    assert UserFunction(name="twice", source=SOURCE).digest == TWICE.digest
    assert UserFunction(name="twice", source=SOURCE.replace("2", "3")).digest != TWICE.digest


@pytest.mark.parametrize(
    ("name", "source", "rule"),
    [
        ("<lambda>", "def f(score):\n    return score\n", "name of a Python function, got '<lambda>'"),
        ("f", "lambda score: score\n", "starts with its def line, got 'lambda"),
        ("f", "def g(score):\n    return score\n", "source of f starts with its def line"),
        ("f", "    def f(score):\n        return score\n", "starts with its def line"),
        ("f", "@jit\ndef f(score):\n    return score\n", "starts with its def line"),
        ("f", "def f(score):\n    return score", "starts with its def line"),
    ],
)
def test_a_wrong_function_is_refused(name: str, source: str, rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        UserFunction(name=name, source=source)


def test_a_key_names_digests_and_never_source() -> None:
    assert ScoreMods(score_mod=TWICE).key == f"score_{TWICE.digest}"
    everything = ScoreMods(score_mod=TWICE, mask_mod=EVEN, aux=("fp32", "i32"), block_mask=True)
    assert everything.key == f"score_{TWICE.digest}-mask_{EVEN.digest}-fp32-i32-blocks"
    one_pointer_less = replace(everything, aux=("fp32",))
    assert one_pointer_less.key != everything.key


def test_modifications_need_a_function_and_blocks_a_mask() -> None:
    with pytest.raises(WorkloadError, match="a score_mod or a mask_mod, got neither"):
        ScoreMods(aux=("fp32",))
    with pytest.raises(WorkloadError, match="a block mask belongs to a mask_mod"):
        ScoreMods(score_mod=TWICE, block_mask=True)


def test_a_specialization_with_user_code_shares_the_records_of_its_class() -> None:
    spec = Specialization.of(PLAIN, mods=ScoreMods(mask_mod=EVEN))
    assert spec != PLAIN.specialization
    assert spec.workload_class == PLAIN.specialization.workload_class
    assert spec.key == f"{PLAIN.specialization.key}-mask_{EVEN.digest}"
    with pytest.raises(WorkloadError, match=f"mask_{EVEN.digest}"):
        Specialization.parse(spec.key)  # a digest is no source
