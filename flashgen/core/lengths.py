"""Profiles of lengths: what the sequences of a decode batch may be like, which no host knows.

A profile gives every batch its lengths without a seed, so that a key with its token means one problem.
"""

from __future__ import annotations

from collections.abc import Callable

SAME, RAMP, TAIL = "same", "ramp", "tail"

ANY = ""
"""Of a workload for batches whose lengths may be anything: what is tuned for it is good on every profile."""

TAIL_SHARE = 64


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


def page_class(page_size: int | None) -> int:
    """Pages that may share a tuned config: 0 is no pages at all, else the least size of the class.

    Classes are 1, 2 to 15, 16, 32, 64 and 128 on: a page of as many keys as a step, or more, costs one id a step.
    """
    if page_size is None:
        return 0
    return max(least for least in _PAGE_CLASSES if least <= page_size)


_PAGE_CLASSES = (1, 2, 16, 32, 64, 128)
