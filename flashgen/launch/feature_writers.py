"""Writers of feature arguments: from the `Features` of a call into the parameter memory of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    tensors = {name: slot for name, slot in slots.items() if feature_arguments.is_tensor(name)}
    described = describe or {}
    writers += [_describing_writer(tensors[name], name, described[name]) for name in tensors if name in described]
    plain = [(slot, feature_arguments.finder(name), name) for name, slot in tensors.items() if name not in described]
    if not writers and not plain:
        return None

    def write(features: Features, scale: float) -> None:
        for writer in writers:
            writer(features, scale)
        for slot, find, name in plain:
            tensor = find(features)
            if tensor is None:
                feature_arguments.refuse(name)
            slot.value = tensor.data_ptr()

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


def _describing_writer(slot: Any, name: str, point_to: Describe) -> WriteFeatures:
    """Writes the pointer to a tensor that also has descriptors."""
    find = feature_arguments.tensor_of(name)

    def write(features: Features, scale: float) -> None:
        pointer = find(features).data_ptr()
        point_to(pointer)
        slot.value = pointer

    return write
