"""An implementation that can be called in several ways races with the fastest of them, which a short trial finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.impls import Impl
from flashgen.core.workload import Workload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant(Generic[T]):
    """What races for an implementation.

    Attributes:
        impl: the implementation, or the fastest of its variants.
        made: what was made of it, or the reason why there is nothing.
        trials: of each variant its time or why it has none, for people.
    """

    impl: Impl
    made: T | str
    trials: tuple[str, ...] = ()


def fastest(
    impl: Impl,
    workload: Workload,
    enter: Callable[[Impl], T | str],
    trial: Callable[[Impl, T], float | str],
) -> Entrant[T]:
    """The variant of `impl` that races.

    A variant that cannot be entered or that breaks in its trial costs itself only; an implementation without variants
    is entered as it is.

    Args:
        impl: the implementation.
        workload: what is raced.
        enter: prepares and checks a variant; a text says why it cannot race.
        trial: ms per call of an entered variant, or why it broke.
    """
    if impl.variants is None:
        return Entrant(impl=impl, made=enter(impl))
    reason = impl.unsupported(workload)
    if reason is not None:
        return Entrant(impl=impl, made=reason)
    seen: dict[str, float] = {}
    best: tuple[Impl, T] | None = None
    trials: list[str] = []
    while (variant := impl.variants.next(workload, seen)) is not None:
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
