"""Writers of feature arguments: from the `Features` of a call into the parameter memory of a plan."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flashgen.core.features.declaration import KernelNumbers
from flashgen.core.features.values import Features
from flashgen.launch import feature_arguments
from flashgen.launch.parameters import WORD_FORMATS

WriteFeatures = Callable[[Features, float], None]
"""Writes what the features and the softmax scale of a call ask for."""

Describe = Callable[[int], None]
"""Makes the descriptors of a tensor point to its memory."""

FeaturesWriter = Callable[[Any, Mapping[str, int], Mapping[str, Describe]], WriteFeatures]
"""Of a geometry, by its memory as words, the arguments that it fixes, and what describes each described tensor."""

_FP32 = WORD_FORMATS["fp32"]


def features_writer(
    places: Mapping[str, int], formats: Mapping[str, str], *, causal: bool, described: Collection[str] = ()
) -> FeaturesWriter | None:
    """What makes that from the memory of a geometry, or None for kernels that have none: plain calls pay nothing.

    Args:
        places: the words of the parameters that launches write, by name.
        formats: how the number in the word of a parameter is packed, by name.
        causal: whether a causal mask is compiled in.
        described: those tensors of the features that a kernel also has descriptors of, by the names of their words.
    """
    groups = [one for one in feature_arguments.NUMBERS if any(name in places for name in one.names)]
    words_of = [[(places.get(name), formats.get(name) == _FP32) for name in one.names] for one in groups]
    numbers = list(zip(groups, words_of, strict=True))
    tensors = [(word, name) for name, word in places.items() if feature_arguments.is_tensor(name)]
    plain = [(word, feature_arguments.finder(name), name) for word, name in tensors if name not in described]
    others = [(word, name) for word, name in tensors if name in described]
    if not (numbers or tensors):
        return None

    def at_sizes(words: Any, scalars: Mapping[str, int], describe: Mapping[str, Describe]) -> WriteFeatures:
        writers = [_number_writer(one, placed, words, scalars, causal=causal) for one, placed in numbers]
        writers += [_describing_writer(word, name, words, describe[name]) for word, name in others]

        def write(features: Features, scale: float) -> None:
            for writer in writers:
                writer(features, scale)
            for word, find, name in plain:
                tensor = find(features)
                if tensor is None:
                    feature_arguments.refuse(name)
                words[word] = tensor.data_ptr()

        return write

    return at_sizes


def _number_writer(
    numbers: KernelNumbers,
    placed: Sequence[tuple[int | None, bool]],
    words: Any,
    scalars: Mapping[str, int],
    *,
    causal: bool,
) -> WriteFeatures:
    """Writes the numbers of a group where what they follow from has changed; a kernel may have only some of them.

    `placed` has the word of each, or None, and whether it is a float.
    """
    follows, compute = numbers.follows, numbers.of
    last: object = None

    def write(features: Features, scale: float) -> None:
        nonlocal last
        given = follows(features, scale)
        if given != last:
            for (word, is_float), value in zip(placed, compute(features, scale, scalars, causal), strict=True):
                if word is not None:
                    words[word] = int.from_bytes(ctypes.c_float(value), "little") if is_float else value
            last = given

    return write


def _describing_writer(word: int, name: str, words: Any, point_to: Describe) -> WriteFeatures:
    """Writes the pointer to a tensor that also has descriptors."""
    find = feature_arguments.tensor_of(name)

    def write(features: Features, scale: float) -> None:
        pointer = find(features).data_ptr()
        point_to(pointer)
        words[word] = pointer

    return write
