"""Distances between workloads: what counts, and how much."""

from __future__ import annotations

import math

import pytest

from flashgen.codegen.family import Sizes
from flashgen.core.nearest import distance, in_blocks, position
from flashgen.core.workload import Workload


def far(one: str, other: str) -> float:
    positions = [position(Workload.parse(text)) for text in (one, other)]
    assert distance(*positions) == distance(*reversed(positions))
    return distance(*positions)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("b2-h8-hk4-sq512-sk1024-d64", 0.0),
        ("b2-h8-hk4-sq1024-sk1024-d64", 1.0),
        ("b2-h8-hk4-sq512-sk256-d64", 2.0),
        ("b1-h8-hk4-sq512-sk1024-d64", 0.5),
        ("b1-h16-hk8-sq512-sk1024-d64", 0.0),
        ("b2-h8-hk8-sq512-sk1024-d64", 0.25),
        ("b8-h8-hk4-sq1024-sk4096-d64", 4.0),
    ],
)
def test_each_size_counts_by_its_ratio_and_weight(other: str, expected: float) -> None:
    assert far("b2-h8-hk4-sq512-sk1024-d64", other) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("length", "counted"),
    [(0, 0), (1, 1), (63, 63), (64, 64), (65, 80), (80, 80), (512, 512), (513, 576), (577, 640), (2**31 - 1, 2**31)],
)
def test_lengths_count_in_blocks(length: int, counted: int) -> None:
    assert in_blocks(length) == counted


@pytest.mark.parametrize(("length", "counted"), [(64, 64), (513, 528), (1057, 1072), (2048, 2048), (2049, 2112)])
def test_lengths_of_heads_that_share_keys_count_in_smaller_blocks(length: int, counted: int) -> None:
    assert in_blocks(length, is_grouped=True) == counted
    sizes = Sizes(1, 8, 2, length, length).in_blocks()
    assert sizes[3:5] == (counted, counted)
    rows, keys, *_ = position(Workload.parse(f"b1-h8-hk2-s{length}-d64"))
    assert rows == keys == math.log2(counted)


def test_as_many_blocks_are_no_distance() -> None:
    assert far("b1-h1-s1025-d64", "b1-h1-s1088-d64") == far("b1-h1-s65-d64", "b1-h1-s80-d64") == 0
    assert far("b1-h1-s1024-d64", "b1-h1-s1025-d64") > 0 < far("b1-h1-s63-d64", "b1-h1-s64-d64")


def test_nothing_at_all_is_as_far_as_one() -> None:
    assert far("b0-h8-s0-d64", "b1-h1-s1-d64") == 0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("wl1023-causal", "wl511-causal", 1.0),
        ("wl1023-causal", "wl1023-causal", 0.0),
        ("wl255-wr256", "wl511-wr512", 1.0),
        ("wl0-wr0", "wl1023-wr0", 10.0),
        ("wr100", "wr200", 0.0),  # every key to the left is visible: that is what counts
        ("wl4000-causal", "wl4090-causal", 0.0),  # more than there are keys
    ],
)
def test_close_windows_are_near(one: str, other: str, expected: float) -> None:
    shape = "b1-h8-s2048-d64-"
    if expected == 0.0 and "wl4000" in one:
        shape = "b1-h8-sq4096-sk2048-d64-"
    assert far(shape + one, shape + other) == pytest.approx(expected, abs=0.01)
