"""The order in which kernels take their turns in a race: nobody is always first, or always behind the same one.

Under a power cap a kernel's first tenths of a second depend on what ran before it: behind one that draws less power it
starts on a higher clock, and then falls below the one that it can hold. A backward pass of head_dim 256 on an H200 took
5% longer behind cuDNN's than behind itself. So the orders are rows of Williams designs, in which everybody follows
everybody else once.

Source: Williams, "Experimental designs balanced for the estimation of residual effects of treatments", Australian
Journal of Scientific Research A 2 (1949).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence


class Turns:
    """Orders for one round after the other, in each of which another set of subjects may take part."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[int, int]] = Counter()
        self._last: tuple[int, ...] = ()

    def next(self, subjects: Sequence[int]) -> tuple[int, ...]:
        """`subjects` in the order of a row of their design whose neighbours, in this order, were seen least before.

        The last one of the round before is a neighbour, too, of itself where it may be: then nothing changes there. A
        race begins behind its first subject.
        """
        last = self._last or tuple(subjects[:1])

        def neighbours(order: tuple[int, ...]) -> list[tuple[int, int]]:
            return list(itertools.pairwise((*last, *order)))

        def cost(order: tuple[int, ...]) -> tuple[int, bool]:
            return sum(self._seen[pair] for pair in neighbours(order)), order[:1] != last

        rows = [tuple(subjects[place] for place in row) for row in _design(len(subjects))]
        order = min(rows, key=cost, default=())
        self._seen.update(neighbours(order))
        self._last = order[-1:] or last
        return order


def orders(count: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """For each round the order in which `count` subjects take their turns, as of `Turns`."""
    turns, subjects = Turns(), range(count)
    return tuple(turns.next(subjects) for _ in range(rounds))


@functools.cache
def _design(count: int) -> tuple[tuple[int, ...], ...]:
    """A Williams design: `count` rows, of odd counts their mirror images as well.

    Rows are 0, 1, n - 1, 2, n - 2, ... shifted: all differences between neighbours are there, and everybody has every
    place.
    """
    zigzag = [(step + 1) // 2 if step % 2 else (count - step // 2) % count for step in range(count)]
    rows = [tuple((shift + place) % count for place in zigzag) for shift in range(count)]
    mirrored = [tuple((shift - place) % count for place in zigzag) for shift in range(count)] if count % 2 else []
    return tuple(dict.fromkeys((*rows, *mirrored)))
