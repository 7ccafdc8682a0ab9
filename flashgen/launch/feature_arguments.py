"""From the `Features` of a call to the parameters of kernels, as the table of features declares them.

Every parameter of a feature has one writer: `TENSORS` and `NUMBERS` are written by launches, `SIZES` by the geometry.
A parameter that nobody writes is refused by `flashgen.launch.binding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any, NoReturn

import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.scores import LOG2E
from flashgen.core.features.table import FEATURES
from flashgen.core.features.values import Features

__all__ = ["CALL_NUMBERS", "FAR_FEATURES", "LOG2E", "NO_FEATURES", "NUMBERS", "SIZES", "TENSORS"]

NO_FEATURES = Features()

TENSORS = {tensor.name: tensor.of for feature in FEATURES for tensor in feature.tensors}
"""Pointer parameters, and what finds their tensors in the features of a call; aux tensors are beside them."""

NUMBERS = tuple(numbers for feature in FEATURES for numbers in feature.numbers)
"""Numbers that may differ between the calls of one geometry, in groups that are computed together."""

CALL_NUMBERS = tuple(name for numbers in NUMBERS for name in numbers.names)

SIZES = frozenset(name for feature in FEATURES for name in feature.sizes)
"""Numbers that follow from the geometry."""

FAR_FEATURES = frozenset(
    name
    for feature in FEATURES
    if feature.has_far_reach
    for name in (*(tensor.name for tensor in feature.tensors), *(n for group in feature.numbers for n in group.names))
)
"""Parameters of kernels whose scores depend on query offsets beyond the lengths."""


def arguments(
    names: Set[str], features: Features, softmax_scale: float, scalars: Mapping[str, int], *, causal: bool
) -> dict[str, Any]:
    """What the parameters of features among `names` are bound to; `scalars` has the lengths.

    Raises:
        LaunchError: the features do not have what a kernel with these parameters reads.
    """
    found: dict[str, Any] = {name: tensor_of(name)(features) for name in names if is_tensor(name)}
    for numbers in NUMBERS:
        if not names.isdisjoint(numbers.names):
            found |= zip(numbers.names, numbers.of(features, softmax_scale, scalars, causal), strict=True)
    return found


@functools.lru_cache(maxsize=4096)
def has_arguments(names: frozenset[str]) -> bool:
    """Whether the features of a call write one of these parameters."""
    return not names.isdisjoint(CALL_NUMBERS) or any(is_tensor(name) for name in names)


def is_tensor(name: str) -> bool:
    """Whether a parameter of the launch vocabulary is a tensor of the features."""
    return name in TENSORS or _aux_place(name) is not None


def tensor_of(name: str) -> Callable[[Features], torch.Tensor]:
    """What finds the tensor of a parameter in the features of a call, or raises `LaunchError`."""
    find = finder(name)

    def tensor(features: Features) -> torch.Tensor:
        found = find(features)
        return refuse(name) if found is None else found

    return tensor


def finder(name: str) -> Callable[[Features], torch.Tensor | None]:
    """The same for a launch, which saves a call of a function: None where the features have no such tensor."""
    place = _aux_place(name)
    return TENSORS[name] if place is None else lambda features: next(iter(features.aux[place:]), None)


def refuse(name: str) -> NoReturn:
    """Refuse a call without the tensor of a parameter.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(f"the kernel reads {name}, and the features of the call have none")


def _aux_place(name: str) -> int | None:
    """Where among aux tensors one lies; behind them a launch has the sums of their gradients, the last one first."""
    number = name.removeprefix("D").removeprefix("Aux")
    if number == name or not number.isdecimal() or not name.endswith(f"Aux{number}"):
        return None
    return -1 - int(number) if name.startswith("D") else int(number)
