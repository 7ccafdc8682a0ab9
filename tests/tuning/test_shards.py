"""Shards: every workload in exactly one, as many in each, the same ones every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.core.errors import TuningError
from flashgen.core.workload import Workload
from flashgen.tuning.shards import Shard
from flashgen.tuning.tune import grouped
from flashgen.tuning.workloads import collect

EVERY = collect(models=["all"])


@given(count=st.integers(1, 9), taken=st.integers(0, len(EVERY)))
def test_shards_are_balanced_and_complete(count: int, taken: int) -> None:
    parts = [Shard(index=index, count=count).of(EVERY[:taken]) for index in range(count)]
    for direction in ("forward", "backward"):
        own = [[workload for workload in part if workload.direction == direction] for part in parts]
        assert [w for part in own for w in part] == [w for w in grouped(EVERY[:taken]) if w.direction == direction]
        assert max(map(len, own)) - min(map(len, own)) <= 1
    assert sum(map(len, parts)) == taken


def test_remainders_of_the_two_directions_go_to_different_parts() -> None:
    lengths = [f"b1-h2-s{length}-d64" for length in (64, 128, 192)]
    passes = [Workload.parse(f"{name}-{shape}") for name in ("fwd", "bwd") for shape in lengths]
    parts = [Shard(index=index, count=2).of(passes) for index in range(2)]
    assert [len(part) for part in parts] == [3, 3]
    assert [part[0].direction for part in parts] == ["forward", "forward"]


def test_one_of_one_is_everything() -> None:
    assert Shard().of(EVERY) == grouped(EVERY)


def test_specializations_are_cut_at_most_once_a_border() -> None:
    parts = [Shard(index=index, count=4).of(EVERY) for index in range(4)]
    owners: dict[str, set[int]] = {}
    for index, part in enumerate(parts):
        for workload in part:
            owners.setdefault(workload.specialization.key, set()).add(index)
    for name in ("fwd", "bwd"):
        assert sum(len(found) > 1 for key, found in owners.items() if key.startswith(name)) <= 3


def test_the_order_of_the_command_line_decides_and_repeats_do_not_count() -> None:
    one, other = Workload.parse("b1-h2-s64-d64"), Workload.parse("b1-h2-s64-d128")
    assert Shard.parse("0/2").of([one, other, one]) == (one,)
    assert Shard.parse(" 1/2 ").of([one, other, one]) == (other,)


@pytest.mark.parametrize("text", ["", "1", "4/4", "1/0", "0/0", "-1/4", "1/4/2", "a/b", "1.5/4", "0/9999999"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(TuningError, match="a shard is i/n with i from 0 to n - 1, got"):
        Shard.parse(text)
