"""An implementation that can be called in several ways races with the fastest of them, which a short trial finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Contestant(Protocol[S]):
    """An implementation of what is raced, an `S`; `variants` has `next` of `benchmarks.impls.Variants`."""

    version: Callable[[], str]
    unsupported: Callable[[S], str | None]
    variants: Any


C = TypeVar("C", bound=Contestant[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant(Generic[C, T]):
    """What races for an implementation.

    Attributes:
        impl: the implementation, or the fastest of its variants.
        made: what was made of it, or the reason why there is nothing.
        trials: of each variant its time or why it has none, for people.
    """

    impl: C
    made: T | str
    trials: tuple[str, ...] = ()


def fastest(
    impl: C,
    subject: S,
    enter: Callable[[C], T | str],
    trial: Callable[[C, T], float | str],
) -> Entrant[C, T]:
    """The variant of `impl` that races.

    A variant that cannot be entered or that breaks in its trial costs itself only; an implementation without variants
    is entered as it is.

    Args:
        impl: the implementation.
        subject: what is raced: a workload, or a batch of packed sequences.
        enter: prepares and checks a variant; a text says why it cannot race.
        trial: ms per call of an entered variant, or why it broke.
    """
    if impl.variants is None:
        return Entrant(impl=impl, made=enter(impl))
    reason = impl.unsupported(subject)
    if reason is not None:
        return Entrant(impl=impl, made=reason)
    seen: dict[str, float] = {}
    best: tuple[C, T] | None = None
    trials: list[str] = []
    while (variant := impl.variants.next(subject, seen)) is not None:
        made = enter(variant)
        ms = made if isinstance(made, str) else trial(variant, made)
        version = variant.version()
        seen[version] = math.inf if isinstance(ms, str) else ms
        trials.append(f"{version}: {ms}" if isinstance(ms, str) else f"{version}: {ms:.4f} ms")
        if not isinstance(ms, str) and not isinstance(made, str) and (best is None or ms < seen[best[0].version()]):
            best = (variant, made)
    if best is None:
        return Entrant(impl=impl, made="; ".join(trials) or "none of its variants is for this workload")
    return Entrant(impl=best[0], made=best[1], trials=tuple(trials))
