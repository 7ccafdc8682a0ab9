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
    assert [workload for part in parts for workload in part] == list(grouped(EVERY[:taken]))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_of_one_is_everything() -> None:
    assert Shard().of(EVERY) == grouped(EVERY)


def test_specializations_are_cut_at_most_once_a_border() -> None:
    parts = [Shard(index=index, count=4).of(EVERY) for index in range(4)]
    owners: dict[str, set[int]] = {}
    for index, part in enumerate(parts):
        for workload in part:
            owners.setdefault(workload.specialization.key, set()).add(index)
    assert sum(len(found) > 1 for found in owners.values()) <= 3


def test_the_order_of_the_command_line_decides_and_repeats_do_not_count() -> None:
    one, other = Workload.parse("b1-h2-s64-d64"), Workload.parse("b1-h2-s64-d128")
    assert Shard.parse("0/2").of([one, other, one]) == (one,)
    assert Shard.parse(" 1/2 ").of([one, other, one]) == (other,)


@pytest.mark.parametrize("text", ["", "1", "4/4", "1/0", "0/0", "-1/4", "1/4/2", "a/b", "1.5/4", "0/9999999"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(TuningError, match="a shard is i/n with i from 0 to n - 1, got"):
        Shard.parse(text)
