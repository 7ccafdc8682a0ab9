"""An implementation that can be called in several ways races with the fastest of them, which a short trial finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from benchmarks.impls import Impl
from flashgen.core.workload import Workload

T = TypeVar("T")


def fastest(
    impl: Impl,
    workload: Workload,
    enter: Callable[[Impl], T | str],
    trial: Callable[[Impl, T], float | str],
) -> tuple[Impl, T | str]:
    """The variant of `impl` that races, and what `enter` made of it or the reason why there is none.

    A variant that cannot be entered or that breaks in its trial costs itself only; an implementation without variants
    is entered as it is.

    Args:
        impl: the implementation.
        workload: what is raced.
        enter: prepares and checks a variant; a text says why it cannot race.
        trial: ms per call of an entered variant, or why it broke.
    """
    if impl.variants is None:
        return impl, enter(impl)
    reason = impl.unsupported(workload)
    if reason is not None:
        return impl, reason
    seen: dict[str, float] = {}
    best: tuple[Impl, T] | None = None
    reasons: list[str] = []
    while (variant := impl.variants.next(workload, seen)) is not None:
        made = enter(variant)
        ms = made if isinstance(made, str) else trial(variant, made)
        seen[variant.version()] = math.inf if isinstance(ms, str) else ms
        if isinstance(ms, str) or isinstance(made, str):
            reasons.append(f"{variant.version()}: {ms}")
        elif best is None or ms < seen[best[0].version()]:
            best = (variant, made)
    return best or (impl, "; ".join(reasons) or "none of its variants is for this workload")
