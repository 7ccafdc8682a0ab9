"""Writers of feature arguments: from the `Extras` of a call into the parameter memory of a plan."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashgen.launch import features
from flashgen.launch.extras import Extras

WriteExtras = Callable[[Extras, float], None]
"""Writes what the extras and the softmax scale of a call ask for."""


Describe = Callable[[int], None]
"""Makes the descriptors of a tensor point to its memory."""


def extras_writer(
    slots: Mapping[str, Any],
    scalars: Mapping[str, int],
    *,
    causal: bool,
    describe: Mapping[str, Describe] | None = None,
) -> WriteExtras | None:
    """What writes the arguments of features, or None for kernels that have none: plain calls pay nothing.

    Args:
        slots: the parameters that launches write, by name: ctypes values in the memory that the driver reads.
        scalars: the arguments that a geometry fixes.
        causal: whether a causal mask is compiled in.
        describe: for those tensors of the extras that a kernel also has descriptors of, by the names of their slots.
    """
    writers = [*_window_writers(slots, scalars, causal=causal), *_softcap_writers(slots)]
    writers += _tensor_writers(slots, describe or {})
    if not writers:
        return None

    def write(extras: Extras, scale: float) -> None:
        for writer in writers:
            writer(extras, scale)

    return write


def _window_writers(slots: Mapping[str, Any], scalars: Mapping[str, int], *, causal: bool) -> list[WriteExtras]:
    if not any(name in slots for name in features.WINDOW):
        return []
    left_slot, right_slot = (slots.get(name, ctypes.c_int32(0)) for name in features.WINDOW)
    seqlen_q, seqlen_k = scalars["seqlen_q"], scalars["seqlen_k"]
    last: tuple[int | None, int | None] | None = None

    def write(extras: Extras, scale: float) -> None:
        nonlocal last
        if extras.window != last:
            left_slot.value, right_slot.value = features.window_edges(extras, seqlen_q, seqlen_k, causal=causal)
            last = extras.window

    return [write]


def _softcap_writers(slots: Mapping[str, Any]) -> list[WriteExtras]:
    if not any(name in slots for name in features.SOFTCAP):
        return []
    rate_slot, scale_slot = (slots.get(name, ctypes.c_float(0)) for name in features.SOFTCAP)
    last = (0.0, 0.0)

    def write(extras: Extras, scale: float) -> None:
        nonlocal last
        if (extras.softcap, scale) != last:
            rate_slot.value, scale_slot.value = features.softcap_factors(extras, scale)
            last = (extras.softcap, scale)

    return [write]


def _tensor_writers(slots: Mapping[str, Any], describe: Mapping[str, Describe]) -> list[WriteExtras]:
    def describing(slot: Any, find: Callable[[Extras], torch.Tensor], point_to: Describe) -> WriteExtras:
        def write(extras: Extras, scale: float) -> None:
            pointer = find(extras).data_ptr()
            point_to(pointer)
            slot.value = pointer

        return write

    def writer(slot: Any, find: Callable[[Extras], torch.Tensor]) -> WriteExtras:
        def write(extras: Extras, scale: float) -> None:
            slot.value = find(extras).data_ptr()

        return write

    named = [(name, slot) for name, slot in slots.items() if features.is_tensor(name)]
    return [
        describing(slot, features.tensor_of(name), describe[name])
        if name in describe
        else writer(slot, features.tensor_of(name))
        for name, slot in named
    ]
