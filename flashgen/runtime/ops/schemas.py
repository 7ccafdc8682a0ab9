"""The schemas of the torch.library ops, and the one place where features become flat arguments and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.features import table
from flashgen.core.features.declaration import OpArgument, Value
from flashgen.core.features.positions import CAUSAL, Q_OFFSET
from flashgen.core.features.promises import DETERMINISTIC
from flashgen.core.features.values import Features
from flashgen.runtime.ops.generated import features_from_function, flat_arguments, of_numbers, restore_function
from flashgen.runtime.ops.keys import fields_reader


def text_of(arguments: Iterable[OpArgument]) -> str:
    """Arguments as a schema has them."""
    return ", ".join(argument.schema for argument in arguments)


INPUTS = "Tensor q, Tensor k, Tensor v"
OPTIONS = f"{text_of(CAUSAL.options)}, float? softmax_scale=None, bool bshd=False, {text_of(Q_OFFSET.options)}"
"""What every op has behind its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatArguments:
    """What an op has behind its options: features as flat arguments, and others beside them.

    Attributes:
        schema: the text.
        reads: for every argument of a feature, the field and what makes the argument from it.
        beside: the arguments that are of no feature.
        late: the fields whose arguments stand behind them, in groups that came one after the other.
        restored: the features from these arguments, and what is beside them. Torch leaves out arguments at the end that
            equal their defaults.
    """

    schema: str
    reads: tuple[tuple[str, Callable[[Any], Any]], ...]
    beside: tuple[OpArgument, ...]
    late: tuple[tuple[Value, ...], ...]
    restored: Callable[..., tuple[Any, ...]]

    @classmethod
    def of(
        cls, values: tuple[Value, ...], beside: tuple[OpArgument, ...] = (), *, trains: bool = False
    ) -> FlatArguments:
        """Those of these fields of `Features`, and others behind them; then those of fields that are late."""
        last = tuple(value for value in values if trains and value.is_last_in_training)
        late = tuple(value for value in values if value.is_late)
        early = tuple(value for value in values if value not in late and value not in last)
        arguments = flat_arguments(early, beside, late, last)
        return cls(
            schema=text_of(arguments),
            reads=tuple((value.name, read) for value in early for read in value.reads),
            beside=beside,
            late=(late, last),
            restored=restore_function(values, arguments, beside),
        )

    def flat(self, features: Features, *beside: Any) -> tuple[Any, ...]:
        """The arguments of an op for these features."""
        found = (*(read(getattr(features, name)) for name, read in self.reads), *beside)
        groups = 0
        for number, group in enumerate(self.late, 1):
            if any(value.is_in(features) for value in group):
                groups = number
        if not groups:
            return found
        absent = (argument.default for argument in self.beside[len(beside) :])
        late = (value for group in self.late[:groups] for value in group)
        return (*found, *absent, *(read(getattr(features, value.name)) for value in late for read in value.reads))


SERVED = FlatArguments.of(table.values())
TRAINED = FlatArguments.of(table.values(trains=True), DETERMINISTIC.options, trains=True)
DIFFERENTIATED = FlatArguments.of(
    table.values(trains=True),
    (*DETERMINISTIC.options, *(gradient.needed for gradient in table.gradients())),
    trains=True,
)
"""Of forward passes, of those that have a gradient, and of backward passes."""

GRADIENT_FIELDS = tuple(gradient.field for gradient in table.gradients())
"""Fields of `Features` that have a gradient, in the order in which backward passes return them."""

differentiable_of = fields_reader(GRADIENT_FIELDS)

TENSOR_FIELDS = tuple(value.name for value in table.values(trains=True) if value.is_tensor)
_NUMBER_FIELDS = tuple(value.name for value in table.values(trains=True) if value.is_number)
_SEVERAL = tuple(value for value in table.values(trains=True) if value.chooses_code == "tensors")
_FIELDS = (*TENSOR_FIELDS, *_NUMBER_FIELDS)
_tensors, _numbers = fields_reader(TENSOR_FIELDS), fields_reader(_NUMBER_FIELDS)
_of_fields = features_from_function(_FIELDS)

Numbers = tuple[Any, ...]


def split(features: Features) -> tuple[tuple[torch.Tensor | None, ...], Numbers]:
    """The tensors of features that train, which autograd keeps in its own way, and the rest.

    Tensors of fields that hold several stand behind the others; last of the rest is what such fields have beside them,
    or how many they have.
    """
    tensors, numbers = _tensors(features), _numbers(features)
    if not any(value.is_in(features) for value in _SEVERAL):
        return tensors, numbers
    parts = [read(getattr(features, value.name)) for value in _SEVERAL for read in value.reads]
    several = [tensor for part in parts if _holds_tensors(part) for tensor in part]
    return (*tensors, *several), (*numbers, [_Count(len(part)) if _holds_tensors(part) else part for part in parts])


def _holds_tensors(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(one, torch.Tensor) for one in part)


class _Count(int):
    """Of the tensors in the place of a list of them."""


def joined(tensors: Sequence[torch.Tensor | None], numbers: Numbers) -> Features:
    """What `split` took apart."""
    if len(numbers) > len(_NUMBER_FIELDS):
        return _joined_with_several(tensors, numbers)
    for tensor in tensors:
        if tensor is not None:
            return _of_fields(*tensors, *numbers)
    try:
        return of_numbers(*numbers)
    except TypeError:  # symbolic numbers of a graph have no hash
        return _of_fields(*tensors, *numbers)


def _joined_with_several(tensors: Sequence[torch.Tensor | None], numbers: Numbers) -> Features:
    *plain, rest = numbers
    several = iter(tensors[len(TENSOR_FIELDS) :])
    parts = iter([[next(several) for _ in range(part)] if isinstance(part, _Count) else part for part in rest])
    fields = dict(zip(_FIELDS, (*tensors[: len(TENSOR_FIELDS)], *plain), strict=True))
    return Features(**fields, **{value.name: value.restore(*(next(parts) for _ in value.reads)) for value in _SEVERAL})
