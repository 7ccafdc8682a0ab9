"""Writers of feature arguments: from the `Features` of a call into the parameter memory of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashgen.core.features.declaration import KernelNumbers
from flashgen.core.features.values import Features
from flashgen.launch import feature_arguments

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
    groups = (numbers for numbers in feature_arguments.NUMBERS if any(name in slots for name in numbers.names))
    writers = [_number_writer(numbers, slots, scalars, causal=causal) for numbers in groups]
    writers += _tensor_writers(slots, describe or {})
    if not writers:
        return None

    def write(features: Features, scale: float) -> None:
        for writer in writers:
            writer(features, scale)

    return write


def _number_writer(
    numbers: KernelNumbers, slots: Mapping[str, Any], scalars: Mapping[str, int], *, causal: bool
) -> WriteFeatures:
    """Writes the numbers of a group where what they follow from has changed; a kernel may have only some of them."""
    placed = [slots.get(name) for name in numbers.names]
    follows, compute = numbers.follows, numbers.of
    last: object = None

    def write(features: Features, scale: float) -> None:
        nonlocal last
        given = follows(features, scale)
        if given != last:
            for slot, value in zip(placed, compute(features, scale, scalars, causal), strict=True):
                if slot is not None:
                    slot.value = value
            last = given

    return write


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
