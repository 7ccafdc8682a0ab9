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
from flashgen.runtime.ops.generated import flat_arguments, of_numbers, restore_function
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
        late: the fields whose arguments stand behind them.
        restored: the features from these arguments, and what is beside them. Torch leaves out arguments at the end that
            equal their defaults.
    """

    schema: str
    reads: tuple[tuple[str, Callable[[Any], Any]], ...]
    beside: tuple[OpArgument, ...]
    late: tuple[Value, ...]
    restored: Callable[..., tuple[Any, ...]]

    @classmethod
    def of(cls, values: tuple[Value, ...], beside: tuple[OpArgument, ...] = ()) -> FlatArguments:
        """Those of these fields of `Features`, and others behind them; then those of fields that are late."""
        return cls(
            schema=text_of(flat_arguments(values, beside)),
            reads=tuple((value.name, read) for value in values if not value.is_late for read in value.reads),
            beside=beside,
            late=tuple(value for value in values if value.is_late),
            restored=restore_function(values, beside),
        )

    def flat(self, features: Features, *beside: Any) -> tuple[Any, ...]:
        """The arguments of an op for these features."""
        found = (*(read(getattr(features, name)) for name, read in self.reads), *beside)
        if not any(value.is_in(features) for value in self.late):
            return found
        absent = (argument.default for argument in self.beside[len(beside) :])
        late = (read(getattr(features, value.name)) for value in self.late for read in value.reads)
        return (*found, *absent, *late)


SERVED = FlatArguments.of(table.values())
TRAINED = FlatArguments.of(table.values(trains=True), DETERMINISTIC.options)
DIFFERENTIATED = FlatArguments.of(
    table.values(trains=True), (*DETERMINISTIC.options, *(gradient.needed for gradient in table.gradients()))
)
"""Of forward passes, of those that have a gradient, and of backward passes."""

GRADIENT_FIELDS = tuple(gradient.field for gradient in table.gradients())
"""Fields of `Features` that have a gradient, in the order in which backward passes return them."""

differentiable_of = fields_reader(GRADIENT_FIELDS)

TENSOR_FIELDS = tuple(value.name for value in table.values(trains=True) if value.is_tensor)
_NUMBER_FIELDS = tuple(value.name for value in table.values(trains=True) if not value.is_tensor)
_FIELDS = (*TENSOR_FIELDS, *_NUMBER_FIELDS)
_tensors, _numbers = fields_reader(TENSOR_FIELDS), fields_reader(_NUMBER_FIELDS)

Numbers = tuple[Any, ...]


def split(features: Features) -> tuple[tuple[torch.Tensor | None, ...], Numbers]:
    """The tensors of features that train, which autograd keeps in its own way, and the rest."""
    return _tensors(features), _numbers(features)


def joined(tensors: Sequence[torch.Tensor | None], numbers: Numbers) -> Features:
    """What `split` took apart."""
    for tensor in tensors:
        if tensor is not None:
            return Features(**dict(zip(_FIELDS, (*tensors, *numbers), strict=True)))
    return of_numbers(*numbers)
