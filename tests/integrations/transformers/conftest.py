"""Models on a CPU: what their attention calls is the reference in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from flashgen import reference
from flashgen.integrations import transformers as door
from flashgen.integrations.transformers.attend import Attention


@pytest.fixture
def fgen() -> Iterator[str]:
    """The name that flashgen's reference is registered under."""
    door.register("fgen", reference=True)
    yield "fgen"
    door.unregister("fgen")


class Calls:
    """The reference, which notes what it is called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(reference, name)

        def noted(*tensors: torch.Tensor, **arguments: Any) -> Any:
            self.seen.append((name, {"tensors": tensors, **arguments}))
            return call(*tensors, **arguments)

        return noted

    def masks(self) -> set[tuple[int, ...] | None]:
        return {None if (mask := given.get("mask")) is None else tuple(mask.shape) for _, given in self.seen}

    def names(self) -> set[str]:
        return {name for name, _ in self.seen}


@pytest.fixture
def calls() -> Iterator[Calls]:
    door.register("fgen", reference=True)
    noted = Calls()
    for name in ("fgen", "paged|fgen"):
        AttentionInterface.register(name, Attention(calls=noted, is_reference=True))
    yield noted
    door.unregister("fgen")
