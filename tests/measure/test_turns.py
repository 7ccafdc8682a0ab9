"""Orders of turns: everybody has every place, and follows everybody else about equally often."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from flashgen.measure.turns import Turns, orders


def followers(turns: tuple[tuple[int, ...], ...]) -> Counter[tuple[int, int]]:
    """How often one came directly behind another in the same round."""
    return Counter(pair for turn in turns for pair in itertools.pairwise(turn))


@pytest.mark.parametrize("count", [2, 4, 6, 8, 12])
def test_in_as_many_rounds_everybody_follows_everybody_else_once(count: int) -> None:
    turns = orders(count, count)
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    assert len({turn.index(subject) * count + subject for turn in turns for subject in range(count)}) == count**2
    counts = followers(turns)
    assert (len(counts), set(counts.values())) == (count * (count - 1), {1})


@pytest.mark.parametrize("count", [3, 5, 7, 13])
def test_odd_counts_take_rounds_in_both_directions(count: int) -> None:
    turns = orders(count, 2 * count)
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    counts = followers(turns)
    assert len(counts) == count * (count - 1)
    assert max(counts.values()) <= 3


@pytest.mark.parametrize("count", [4, 5, 6, 7, 8, 9, 12, 13])
def test_in_three_rounds_nobody_follows_the_same_one_twice(count: int) -> None:
    """Three rounds have a median: two windows behind a kernel that draws less power would decide it."""
    line = [0, *(subject for turn in orders(count, 3) for subject in turn)]  # the first one runs before a race, too
    assert set(Counter(itertools.pairwise(line)).values()) == {1}


def test_who_leaves_a_race_does_not_disturb_the_balance_of_the_others() -> None:
    turns = Turns()
    for _ in range(3):
        turns.next(range(5))
    rest = tuple(turns.next([0, 2, 4]) for _ in range(6))
    assert all(sorted(turn) == [0, 2, 4] for turn in rest)
    assert len(followers(rest)) == 6
    assert turns.next([4]) == (4,)
    assert turns.next([]) == ()


def test_the_orders_of_a_race_are_the_same_each_time() -> None:
    assert orders(6, 9) == orders(6, 9)
    assert orders(0, 2) == ((), ())
    assert orders(1, 2) == ((0,), (0,))
    assert orders(2, 4) == ((0, 1), (1, 0), (0, 1), (1, 0))
