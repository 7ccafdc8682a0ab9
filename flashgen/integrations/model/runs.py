"""Running a model on a user's examples, and the numbers that it gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flashgen.core.checks import instance
from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown

Tensor = torch.Tensor
Inputs = Tensor | Mapping[str, Any] | Sequence[Any] | Callable[[torch.nn.Module], Any]

UNCOMPARED = ("past_key_values", "attentions")
"""Outputs that are no results: caches hold what padding left there."""


LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """How to run a model: by inputs, or by a function of the caller."""

    given: Inputs

    @classmethod
    def of(cls, given: Any) -> Examples:
        """Examples of a type that can be run.

        Raises:
            WorkloadError: nothing can be called with them.
        """
        is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        if not (is_list or callable(given) or isinstance(given, (Tensor, Mapping))):
            raise WorkloadError(
                "inputs are a tensor, a mapping of named ones, a list of them, or a function that runs the model it is "
                f"given, got {shown(given)}"
            )
        return cls(given=given)

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> Examples:
        """The dummy inputs that a model of transformers has of its own.

        Raises:
            WorkloadError: it has none.
        """
        found = getattr(model, "dummy_inputs", None)
        if not isinstance(found, Mapping) or getattr(model, "main_input_name", None) not in found:
            raise WorkloadError(
                "only models of transformers that read tokens have inputs of their own; give inputs to "
                f"{type(model).__name__}: a tensor, a mapping of named ones, a list of them, or a function that runs it"
            )
        where = next(model.parameters()).device
        return cls(given=tree_map_only(Tensor, lambda x: x.to(where), dict(found)))

    def run(self, model: torch.nn.Module) -> Any:
        """What a model gives."""
        given: Any = self.given
        if isinstance(given, Tensor):
            return model(given)
        if isinstance(given, Mapping):
            return model(**given)
        if isinstance(given, Sequence):
            return model(*given)
        return given(model)

    def results(self, found: Any) -> dict[str, Tensor]:
        """The tensors of floats that a model gave, by name.

        Of padded sequences the rows of tokens alone, and no loss: what attention gives for padding is anybody's choice,
        and a loss may read it, as where the first token behind padding is predicted.
        """
        keep = self.given.get("attention_mask") if isinstance(self.given, Mapping) else None
        named = dict(_named(found, ""))
        if isinstance(keep, Tensor) and keep.dim() == 2 and not bool((rows := keep.bool()).all()):
            named = {name: x[rows] if x.shape[:2] == keep.shape else x for name, x in named.items() if name != LOSS}
        return named

    def loss(self, found: Any) -> Tensor:
        """A model's own loss, or else the mean square of the first thing that it gave.

        Raises:
            WorkloadError: it gave nothing that has a gradient.
        """
        results = self.results(found)
        own = results.get(LOSS)
        if own is not None and own.requires_grad:
            return own
        first = next((one for one in results.values() if one.requires_grad), None)
        if first is None:
            raise WorkloadError("training compares gradients, and the model gave no tensor that has one")
        return (first if first.dtype == torch.float64 else first.float()).square().mean()


def checked_model(model: object) -> torch.nn.Module:
    """A module with parameters.

    Raises:
        WorkloadError: it is none.
    """
    found = instance("model", model, torch.nn.Module)
    if next(found.parameters(), None) is None:
        raise WorkloadError(f"a model has parameters, which say where it is, got {shown(found)}")
    return found


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The narrowest dtype of floats among a model's parameters."""
    kinds = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return max(kinds, key=lambda kind: (torch.finfo(kind).eps, str(kind)), default=torch.float32)


def widened(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A model in another dtype of floats, which takes inputs in any."""

    def cast(module: torch.nn.Module, given: Any, named: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (given, named))

    model.register_forward_pre_hook(cast, with_kwargs=True)
    return model.to(dtype)


@contextlib.contextmanager
def left_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Leave the gradients of a model and the generators of random numbers as they were before a block."""
    kept = [(one, one.grad) for one in model.parameters()]
    indices = sorted({one.device.index or 0 for one, _ in kept if one.is_cuda})
    for one, _ in kept:
        one.grad = None
    try:
        with torch.random.fork_rng(devices=indices):
            yield
    finally:
        for one, gradient in kept:
            one.grad = gradient


def _named(found: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield name or "output", found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            if key not in UNCOMPARED:
                yield from _named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(found, (tuple, list)):
        for number, value in enumerate(found):
            yield from _named(value, f"{name}.{number}" if name else f"output {number}")
