"""Features of positions: causal mask, window, query offset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.core.checks import MAX_INTEGER, is_symbolic
from flashgen.core.errors import WorkloadError
from flashgen.core.features.declaration import (
    Argument,
    CallFacts,
    Feature,
    KernelNumbers,
    OpArgument,
    Support,
    Token,
    Value,
    Variant,
)
from flashgen.core.features.values import Features, Window
from flashgen.core.quoting import shown

MAX_OFFSET = 1 << 28
"""Query offsets reach this far to both sides, so that sums with lengths and windows stay within 32 bits."""


def checked_window(window: Any) -> Window:
    """A window as a tuple.

    Raises:
        WorkloadError: it is not two edges, each None or an int of at least 0.
    """
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise WorkloadError(f"window is (left, right), got {shown(window)}")
    for edge in window:
        is_whole = (isinstance(edge, int) and not isinstance(edge, bool)) or is_symbolic(edge)
        if edge is None or (is_whole and edge >= 0):
            continue
        hint = "; None is unlimited, where flash-attn writes -1" if type(edge) is int and edge == -1 else ""
        raise WorkloadError(f"an edge of a window is None or an int of at least 0, got {shown(tuple(window))}{hint}")
    left, right = window
    return left, right


def clamp_window(window: Window, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The window as two 32-bit integers: an edge this far away hides nothing, whatever the query offset is."""
    reach = MAX_OFFSET + seqlen_q + seqlen_k
    left, right = window
    return reach if left is None else min(left, reach), reach if right is None else min(right, reach)


def _in_64_bits(edge: int | None) -> int | None:
    """An edge as torch's ops take it: one that is farther away hides nothing either."""
    return edge if edge is None else min(edge, MAX_INTEGER)


def _edges(features: Features, scale: float, sizes: Mapping[str, int], causal: bool) -> tuple[int, int]:
    left, right = features.window
    # a causal mask is a right edge of 0
    return clamp_window((left, 0 if causal else right), sizes["seqlen_q"], sizes["seqlen_k"])


def _workload(features: Features, facts: CallFacts) -> dict[str, Any]:
    left, right = features.window
    if facts.has_own_offset:
        # under an offset of its own, an edge beyond the lengths still hides keys
        _, _, seqlen_q, seqlen_k = facts.sizes
        reach = max(seqlen_q + seqlen_k - 1, 0)
        left, right = (edge if edge is None else min(edge, reach) for edge in (left, right))
    return {"window_left": left, "window_right": right}


def _words(workload: Any) -> tuple[str, ...]:
    """Keys to the left and to the right of a query's own place; a causal mask shows none to the right."""
    right = 0 if workload.causal else workload.window_right
    if workload.window_left is None and (workload.causal or right is None):
        return ()
    sides = ("all" if side is None else str(side) for side in (workload.window_left, right))
    return (f"window {'/'.join(sides)}",)


CAUSAL = Feature(
    name="causal",
    fields=("causal",),
    absent="it has no causal mask",
    arguments=(Argument(name="causal", default=False),),
    options=(OpArgument(schema="bool causal=False", default=False),),
    tokens=(Token(text="causal", field="causal", value=True),),
    words=lambda workload: ("causal",) if workload.causal else (),
    first_words=True,
    support=(Support(group="Masks", name="causal", fields={"causal": True}),),
)

WINDOW = Feature(
    name="window",
    fields=("window", "window_left", "window_right"),
    absent="it has no window",
    arguments=(Argument(name="window", default=(None, None), check=checked_window),),
    values=(
        Value(
            name="window",
            default=(None, None),
            chooses_code="value",
            op=(
                OpArgument(schema="SymInt? window_left=None", default=None, read=lambda window: _in_64_bits(window[0])),
                OpArgument(
                    schema="SymInt? window_right=None", default=None, read=lambda window: _in_64_bits(window[1])
                ),
            ),
            restore=lambda left, right: (left, right),
        ),
    ),
    workload=_workload,
    tokens=(Token(text="wl", field="window_left"), Token(text="wr", field="window_right")),
    variants=(Variant(text="window", field="window", value=True, place="class"),),
    numbers=(
        KernelNumbers(
            names=("window_left", "window_right"),
            type="i32",
            of=_edges,
            follows=lambda features, scale: features.window,
        ),
    ),
    has_far_reach=True,
    words=_words,
    first_words=True,
    support=(Support(group="Masks", name="window, with or without causal", fields={"window": True}),),
)

Q_OFFSET = Feature(
    name="q_offset",
    fields=("offset_tensor",),
    absent="it reads no query offsets from a tensor",
    arguments=(Argument(name="q_offset"),),
    options=(
        OpArgument(schema="SymInt? q_offset=None", default=None),
        OpArgument(schema="Tensor? q_offset_tensor=None", default=None),
    ),
    variants=(Variant(text="offset", field="offset_tensor", value=True, place="offset"),),
    specialization_words=lambda spec: ("offsets on the device",) if spec.offset_tensor else (),
    first_words=True,
    support=(
        Support(group="Masks", name="`q_offset` in a device tensor", fields={"causal": True, "offset_tensor": True}),
    ),
)
