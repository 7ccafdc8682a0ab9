"""Writers of feature arguments: from the `Features` of a call into the parameter memory of a plan."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashgen.launch import feature_arguments
from flashgen.launch.feature_values import Features

WriteFeatures = Callable[[Features, float], None]
"""Writes what the features and the softmax scale of a call ask for."""


Describe = Callable[[int], None]
"""Makes the descriptors of a tensor point to its memory."""


def features_writer(
    slots: Mapping[str, Any],
    scalars: Mapping[str, int],
    *,
    causal: bool,
    describe: Mapping[str, Describe] | None = None,
) -> WriteFeatures | None:
    """What writes the arguments of features, or None for kernels that have none: plain calls pay nothing.

    Args:
        slots: the parameters that launches write, by name: ctypes values in the memory that the driver reads.
        scalars: the arguments that a geometry fixes.
        causal: whether a causal mask is compiled in.
        describe: for those tensors of the features that a kernel also has descriptors of, by the names of their slots.
    """
    writers = [*_window_writers(slots, scalars, causal=causal), *_softcap_writers(slots)]
    writers += _tensor_writers(slots, describe or {})
    if not writers:
        return None

    def write(features: Features, scale: float) -> None:
        for writer in writers:
            writer(features, scale)

    return write


def _window_writers(slots: Mapping[str, Any], scalars: Mapping[str, int], *, causal: bool) -> list[WriteFeatures]:
    if not any(name in slots for name in feature_arguments.WINDOW):
        return []
    left_slot, right_slot = (slots.get(name, ctypes.c_int32(0)) for name in feature_arguments.WINDOW)
    seqlen_q, seqlen_k = scalars["seqlen_q"], scalars["seqlen_k"]
    last: tuple[int | None, int | None] | None = None

    def write(features: Features, scale: float) -> None:
        nonlocal last
        if features.window != last:
            left_slot.value, right_slot.value = feature_arguments.window_edges(
                features, seqlen_q, seqlen_k, causal=causal
            )
            last = features.window

    return [write]


def _softcap_writers(slots: Mapping[str, Any]) -> list[WriteFeatures]:
    if not any(name in slots for name in feature_arguments.SOFTCAP):
        return []
    rate_slot, scale_slot = (slots.get(name, ctypes.c_float(0)) for name in feature_arguments.SOFTCAP)
    last = (0.0, 0.0)

    def write(features: Features, scale: float) -> None:
        nonlocal last
        if (features.softcap, scale) != last:
            rate_slot.value, scale_slot.value = feature_arguments.softcap_factors(features, scale)
            last = (features.softcap, scale)

    return [write]


def _tensor_writers(slots: Mapping[str, Any], describe: Mapping[str, Describe]) -> list[WriteFeatures]:
    def describing(slot: Any, find: Callable[[Features], torch.Tensor], point_to: Describe) -> WriteFeatures:
        def write(features: Features, scale: float) -> None:
            pointer = find(features).data_ptr()
            point_to(pointer)
            slot.value = pointer

        return write

    def writer(slot: Any, find: Callable[[Features], torch.Tensor]) -> WriteFeatures:
        def write(features: Features, scale: float) -> None:
            slot.value = find(features).data_ptr()

        return write

    named = [(name, slot) for name, slot in slots.items() if feature_arguments.is_tensor(name)]
    return [
        describing(slot, feature_arguments.tensor_of(name), describe[name])
        if name in describe
        else writer(slot, feature_arguments.tensor_of(name))
        for name, slot in named
    ]
