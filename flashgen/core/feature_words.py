"""The features of a workload in words, as tables and explanations name them."""

from __future__ import annotations

from flashgen.core.workload import Workload

_KINDS = {"full": "{0}", "keys": "key {0}"}


def feature_words(workload: Workload) -> tuple[str, ...]:
    """What a workload has beside plain attention, in the order in which a kernel applies it; empty for plain attention.

    For example `("causal", "window 4095/0", "softcap", "sinks", "ALiBi", "bias", "key mask")`.
    """
    flags = {"softcap": workload.softcap, "sinks": workload.sink, "ALiBi": workload.alibi}
    found = ["causal"] if workload.causal else []
    found += _window(workload)
    found += [word for word, present in flags.items() if present]
    found += [_KINDS[kind].format(name) for name, kind in (("bias", workload.bias), ("mask", workload.mask)) if kind]
    found += ["varlen"] if workload.varlen else []
    found += [f"pages of {workload.page_size}"] if workload.page_size is not None else []
    found += ["deterministic"] if workload.deterministic else []
    return tuple(found)


def describe(workload: Workload) -> str:
    """`features` as one text, e.g. `causal, window 4095/0`; `plain` where there is none."""
    return ", ".join(feature_words(workload)) or "plain"


def _window(workload: Workload) -> list[str]:
    """Keys to the left and to the right of a query's own place; a causal mask shows none to the right."""
    right = 0 if workload.causal else workload.window_right
    if workload.window_left is None and (workload.causal or right is None):
        return []
    sides = ("all" if side is None else str(side) for side in (workload.window_left, right))
    return [f"window {'/'.join(sides)}"]
