"""What tests of random calls share: choices of arguments, and a call's answers past torch's dispatcher and through it.

A call gives what a kernel wrote, in the promised form, or an error of flashgen's, and gives it again when it is
repeated; through the dispatcher and on the meta device it is answered alike.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.runtime.ops import serve
from tests.fakes.gpu import MARK, OnGpu

SEED = int(os.environ.get("FUZZ_SEED", "1"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)
ODD = 0.06
"""How often a choice is any, in place of the first ones, which fit together."""

Tensors = Callable[[torch.Tensor], torch.Tensor]
Call = Callable[..., Any]
Answer = tuple[torch.Tensor, ...] | str


def cases(usually: int) -> range:
    """The numbers of the cases: `FUZZ_CASES` of them, or as many as `make test` has."""
    return range(FIRST, FIRST + int(os.environ.get("FUZZ_CASES", usually)))


@dataclass
class Chooser:
    """Choices of one case."""

    random: random.Random

    def often(self, usual: Any, *others: Any) -> Any:
        return self.random.choice(others) if others and self.random.random() < ODD else usual

    def of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Of this shape, now and then with other strides, another rank or another dtype."""
        shape = self.often(shape, shape[1:], (*shape, 1), tuple(reversed(shape)), (*shape[:-1], 3), shape[:-1])
        found = torch.zeros(shape, dtype=self.often(dtype, *DTYPES))
        if not found.dim():
            return found
        apart = (lambda: torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=found.dtype)[..., ::2],)
        swapped = (lambda: torch.zeros(shape, dtype=found.dtype).transpose(0, -1),)
        return self.often(lambda: found, *apart, *swapped)()


def moved(given: dict[str, Any], to: Tensors) -> dict[str, Any]:
    """The arguments with every tensor moved."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to(value)
        return tuple(map(one, value)) if isinstance(value, tuple) else value

    return {name: one(value) for name, value in given.items()}


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def answer(call: Call, given: dict[str, Any]) -> Answer:
    """Output and LSE, or the error in words."""
    try:
        found = call(**given)
    except FlashgenError as error:
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, tuple) else (found,)


def form(found: Answer) -> object:
    """What equal answers share: their text, or dtypes, shapes and strides.

    Strides of no element mean nothing: torch's `empty_like` keeps those of q, but not on `meta`.
    """
    if isinstance(found, str):
        return found
    return [(one.dtype, one.shape, one.stride() if one.numel() else None) for one in found]


def without_devices(said: object) -> object:
    """An error without what differs between devices."""
    return said.replace(" on meta", " on cpu").replace("meta", "cpu") if isinstance(said, str) else said


ONLY_WITH_MEMORY = ("is contiguous", "elements apart", "are contiguous")
"""Rules of strides, which wait for real tensors."""


def check_answers(
    call: Call,
    given: dict[str, Any],
    chosen: random.Random,
    where: str,
    promised: Callable[[dict[str, Any]], object],
    *,
    has_keys: bool = True,
) -> None:
    """One call in all ways.

    Args:
        call: the public function.
        given: its arguments.
        chosen: says which tensor is on another device in the end.
        where: names the case.
        promised: the form of what it returns, where it returns something.
        has_keys: False where no kernel may be launched, since there is no key.
    """
    first, again = answer(call, given), answer(call, given)
    assert form(first) == form(again), where
    if not isinstance(first, str):
        assert form(first) == promised(given), where
        values = (MARK,) if has_keys else (MARK, 0.0, -torch.inf)
        written = [torch.isin(one.float(), torch.tensor(values)) for one in (*first, *again)]
        assert all(bool(one.all()) for one in written), f"{where}: what no kernel has written"
    dispatched = answer(call, moved(given, lambda tensor: tensor.as_subclass(OnGpu)))
    assert form(dispatched) == form(first), (where, form(dispatched), form(first))
    with torch.no_grad():
        unwritten = answer(call, moved(given, on_meta))
    if not (
        isinstance(first, str) and (first.startswith("Unsupported") or any(rule in first for rule in ONLY_WITH_MEMORY))
    ):
        assert without_devices(form(unwritten)) == form(first), (where, form(unwritten), form(first))
    name = chosen.choice([name for name, value in given.items() if isinstance(value, torch.Tensor)])
    for new in (lambda tensor: tensor, lambda tensor: tensor.as_subclass(OnGpu)):
        serve.reload()  # a GPU and the meta device have different indices, this CPU and the meta device have not
        mixed = answer(call, {**moved(given, new), name: on_meta(given[name])})
        assert isinstance(mixed, str), f"{where}: {name} is on another device, and nobody has said so"
        assert isinstance(first, str) or mixed.startswith(WorkloadError.__name__), (where, mixed)
