"""Families are asked for the features that they declare, and refuse all others with a reason."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.codegen.families import FAMILIES, applicable, unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.space import search_space
from flashgen.core.device import find_device
from flashgen.core.errors import ConfigError, UnsupportedError
from flashgen.core.features.table import FEATURES, asked
from flashgen.core.workload import Workload
from tests.toy import declare_toy

SHAPE = "b1-h2-s256-d128"


def served(row: KernelFamily) -> Workload:
    workload = Workload.parse(f"{'bwd' if row.direction == 'backward' else 'fwd'}-{SHAPE}")
    assert unsupported(row, workload.specialization, find_device("h200")) is None
    return workload


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
def test_a_feature_that_nobody_declared_is_refused(row: KernelFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, device = served(row).specialization, find_device("h200")
    declare_toy(monkeypatch)
    assert unsupported(row, spec, device) == "it has no toys"
    assert search_space(row, spec, device) == ()
    with pytest.raises(UnsupportedError, match=f"{row.id}: it has no toys"):
        applicable(spec, device)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
def test_a_family_that_declares_less_refuses_more(row: KernelFamily) -> None:
    spec = dataclasses.replace(served(row).specialization, causal=True, window=True)
    less = dataclasses.replace(row, features=row.features - {"window"})
    assert unsupported(row, spec, find_device("h200")) is None
    assert unsupported(less, spec, find_device("h200")) == "it has no window"


def test_a_family_declares_features_of_the_table() -> None:
    with pytest.raises(ConfigError, match=r"got \['toy'\] in hopper_forward"):
        dataclasses.replace(FAMILIES[0], features=FAMILIES[0].features | {"toy"})


def test_a_reason_may_be_that_of_a_direction() -> None:
    reasons = {feature.name: (feature.absence("forward"), feature.absence("backward")) for feature in FEATURES}
    assert reasons["functions"] == (
        "it takes no functions of the caller",
        "no gradient through functions of the caller",
    )
    assert all(forward == backward for name, (forward, backward) in reasons.items() if name != "functions")


def test_a_workload_asks_for_what_its_key_says() -> None:
    workload = Workload.parse(f"bwd-{SHAPE}-causal-wl0-sink-keybias-page16-deterministic")
    expected = ["causal", "window", "sinks", "bias", "pages", "deterministic"]
    assert [feature.name for feature in asked(workload)] == expected
    # sinks are no part of a backward kernel
    assert [feature.name for feature in asked(workload.specialization)] == [n for n in expected if n != "sinks"]
    assert asked(Workload.parse(SHAPE)) == ()
