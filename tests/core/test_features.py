"""The table of features against what is written beside it: values, workloads, keys, parameters of kernels."""

from __future__ import annotations

import dataclasses
import io
import tokenize
from itertools import chain
from pathlib import Path

import pytest

from flashgen.core.features import table
from flashgen.core.features.declaration import Feature
from flashgen.core.features.table import FEATURES
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization, Workload

PACKAGE = Path(__file__).parents[2] / "flashgen"
SHAPES = {
    *("direction", "dtype", "batch", "nheads", "nheads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    *("aligned16", "lengths", "total_q", "total_k"),
}


def names_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_every_field_of_features_is_declared_once() -> None:
    assert sorted(value.name for value in table.values()) == sorted(names_of(Features))
    defaults = {value.name: value.default for value in table.values()}
    assert all(getattr(Features(), name) == default for name, default in defaults.items())
    assert table.given(Features()) == ()


def test_every_field_of_a_workload_and_a_specialization_is_of_a_feature() -> None:
    own = set(chain.from_iterable(feature.fields for feature in FEATURES))
    tokens = {token.field for feature in FEATURES for token in feature.tokens}
    variants = {variant.field for feature in FEATURES for variant in feature.variants}
    assert names_of(Workload) - SHAPES == tokens
    assert names_of(Specialization) - SHAPES - own == variants - own
    assert own <= names_of(Workload) | names_of(Specialization)


def test_what_a_call_may_bring_can_be_asked_for() -> None:
    # what no field asks for, no family could refuse
    for feature in FEATURES:
        assert feature.fields, feature.name
        assert feature.absent, feature.name
        assert not feature.values or set(feature.fields) & names_of(Specialization), feature.name


def test_names_are_used_once() -> None:
    for names in (
        [feature.name for feature in FEATURES],
        [argument.name for feature in FEATURES for argument in feature.arguments],
        [one.name for feature in FEATURES for one in feature.options]
        + [one.name for value in table.values() for one in value.op],
        [token.text for feature in FEATURES for token in (*feature.tokens, *feature.variants)],
        [tensor.name for feature in FEATURES for tensor in feature.tensors],
        [name for feature in FEATURES for numbers in feature.numbers for name in numbers.names],
    ):
        assert len(set(names)) == len(names)


def test_gradients_of_kernels_come_first() -> None:
    assert [gradient.field for gradient in table.gradients()] == ["bias", "sinks"]
    for gradient in table.gradients():
        assert gradient.field in {value.name for value in table.values(trains=True) if value.is_tensor}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_without_a_gradient_says_why(feature: Feature) -> None:
    floats = any(not value.is_number for value in feature.values) and feature.name != "mask"  # which is bool
    assert bool(feature.no_gradient) == ((floats and feature.gradient is None) or not feature.trains)


def identifiers(path: Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token.string for token in tokens if token.type == tokenize.NAME]


def test_a_feature_is_named_in_few_places() -> None:
    """Outside of kernel families: declaration, public calls, gradient, references, the empty launch.

    Backends of engines and FlashAttention's functions have the names of their own.
    """
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    files = [path for path in files if path.parts[0] != "codegen" or len(path.parts) == 2]
    files = [path for path in files if path.parts[0] not in ("integrations", "flash_attn")]
    found = [path for path in files if "sinks" in identifiers(PACKAGE / path)]
    assert len(found) <= 17, found
    assert len([path for path in found if path.parts[0] == "runtime"]) <= 6, found
