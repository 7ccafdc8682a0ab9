"""Profiles of lengths: what the sequences of a decode batch, or packed ones, may be like, which no host knows.

A profile gives every batch its lengths without a seed, so that a key with its token means one problem. Those of packed
sequences fill the rows of the call: they are quantiles of a distribution whose mean is rows / sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

SAME, CLOSE, RAMP, TAIL, MIXED = "same", "close", "ramp", "tail", "mixed"

ANY = ""
"""Of a workload for batches whose lengths may be anything: what is tuned for it is good on every profile."""

TAIL_SHARE = 64

CLOSE_SHARE = 4
"""Lengths of `CLOSE` are within this part of their mean."""


def _same(batch: int, longest: int) -> tuple[int, ...]:
    return (longest,) * batch


def _ramp(batch: int, longest: int) -> tuple[int, ...]:
    return tuple(1 + (longest - 1) * b // (batch - 1) for b in range(batch)) if longest else _same(batch, longest)


def _tail(batch: int, longest: int) -> tuple[int, ...]:
    return (longest, *(longest // TAIL_SHARE,) * (batch - 1))


PROFILES: dict[str, Callable[[int, int], tuple[int, ...]]] = {SAME: _same, RAMP: _ramp, TAIL: _tail}
"""By name, as in keys: all as long as the longest; in equal steps from 1 to it; one of it, and all others a 64th."""


def lengths_of(profile: str, batch: int, longest: int) -> tuple[int, ...]:
    """Keys of each sequence; `ANY` is as `SAME`, the most that a batch can have."""
    return (PROFILES[profile or SAME] if batch > 1 else _same)(batch, longest)


def profiles_of(profile: str, batch: int) -> tuple[str, ...]:
    """The profiles that a workload is measured on, the first one for the times that compare: of `ANY`, all that differ.

    One sequence has one length.
    """
    if profile:
        return (profile,)
    return tuple(PROFILES) if batch > 1 else (SAME,)


def _shares(count: int, total: int) -> tuple[int, ...]:
    """`total` in `count` parts that differ by 1 at most."""
    return tuple(total * (n + 1) // count - total * n // count for n in range(count))


def _between(ends: Iterable[float], longest: int) -> tuple[int, ...]:
    """The whole numbers between ends, none above the longest."""
    whole = [int(end + 1e-6) for end in ends]
    return tuple(min(after - before, longest) for before, after in itertools.pairwise(whole))


def _packed_same(batch: int, longest: int, total: int) -> tuple[int, ...]:
    return _shares(batch, total)


def _packed_ramp(batch: int, longest: int, total: int) -> tuple[int, ...]:
    least = min(1, total // batch)
    longest, total = longest - least, total - least * batch
    power = longest * batch / max(total, 1)  # the quantile `longest * u ** (power - 1)` has the mean total / batch
    between = _between((total * (n / batch) ** power for n in range(batch + 1)), longest)
    return tuple(least + length for length in between)


def _packed_close(batch: int, longest: int, total: int) -> tuple[int, ...]:
    mean = total / batch
    spread = min(mean / CLOSE_SHARE, longest - mean)
    return _between((n * (mean - spread) + spread * n * n / batch for n in range(batch + 1)), longest)


def _packed_tail(batch: int, longest: int, total: int) -> tuple[int, ...]:
    return (longest, *_shares(batch - 1, total - longest))


def _packed_mixed(batch: int, longest: int, total: int) -> tuple[int, ...]:
    chunks = max(1, batch // CHUNK_SHARE)
    rest = batch - chunks
    of_chunks = min(chunks * longest, max(total - rest, 0))
    return (*_shares(rest, total - of_chunks), *_shares(chunks, of_chunks))


CHUNK_SHARE = 4

PACKED_PROFILES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    SAME: _packed_same,
    CLOSE: _packed_close,
    RAMP: _packed_ramp,
    TAIL: _packed_tail,
    MIXED: _packed_mixed,
}
"""The same of packed sequences, from their number, the longest and the rows: all alike; in equal steps within a quarter
of the mean; quantiles of a power of a uniform number, uniform themselves where the mean is half of the longest; one of
the longest, and all others share what is left; a quarter that are chunks of a prefill behind others of one row."""

ALL_PROFILES = tuple(PACKED_PROFILES)


def packed_lengths(profile: str, batch: int, longest: int, total: int) -> tuple[int, ...]:
    """Rows of each of `batch` sequences, none longer than `longest`, that have `total` rows together; `ANY` is `SAME`.

    A rounding may leave one row to nobody, and so may more rows than the sequences can have.
    """
    total = min(total, batch * longest)
    longest = min(longest, total)
    if batch < 2 or not total:
        return (total,) * batch
    return PACKED_PROFILES[profile or SAME](batch, longest, total)


def packed_profiles(profile: str, batch: int, lengths: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """`profiles_of` of packed sequences: of `ANY`, those that differ; chunks where there are other keys than queries.

    Where there are not, lengths that are close to each other are among them: whether all of `SAME`, or most of `TAIL`,
    fit a tile is chance.

    Args:
        profile: the one of the workload, or `ANY`.
        batch: sequences.
        lengths: the longest and the rows, of the queries and, where these are others, of the keys.
    """
    if profile:
        return (profile,)
    found: dict[object, str] = {}
    for name in (SAME, RAMP, TAIL, MIXED if len(lengths) > 1 else CLOSE):
        found.setdefault(tuple(packed_lengths(name, batch, *side) for side in lengths), name)
    return tuple(found.values())


def page_class(page_size: int | None) -> int:
    """Pages that may share a tuned config: 0 is no pages at all, else the least size of the class.

    Classes are 1, 2 to 15, 16, 32, 64 and 128 on: a page of as many keys as a step, or more, costs one id a step.
    """
    if page_size is None:
        return 0
    return max(least for least in PAGE_CLASSES if least <= page_size)


PAGE_CLASSES = (1, 2, 16, 32, 64, 128)
"""The least size of each class of pages."""
