"""Ops under `vmap`: once for each of the mapped calls.

torch's own loop does that for ops without a rule, but takes no list of tensors apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from flashgen.core.errors import UnsupportedError


def refuse_mapping(name: str, function: str, library: torch.library.Library) -> None:
    """Have `vmap` over an op that writes in place refused by name: calls that are mapped may share what is written."""

    def refused(*_: Any) -> tuple[Any, Any]:
        raise UnsupportedError(f"vmap does not map flashgen.{function}, which writes in place: call it for each batch")

    torch.library.register_vmap(f"flashgen::{name}", refused, lib=library)


def map_one_by_one(name: str, library: torch.library.Library) -> None:
    """Have an op of flashgen run once for each call that `vmap` maps over, lists of tensors included."""
    op: Any = getattr(torch.ops.flashgen, name).default

    def mapped(info: Any, dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        if not info.batch_size:
            raise UnsupportedError("vmap maps flashgen's calls over at least one, got 0")
        leaves, tree = pytree.tree_flatten(given)
        places = pytree.tree_leaves(dims)
        found = []
        for number in range(info.batch_size):
            each = (
                leaf if place is None else leaf.select(place, number)
                for leaf, place in zip(leaves, places, strict=True)
            )
            found.append(op(*pytree.tree_unflatten(each, tree)))
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found), 0
        stacks = tuple(torch.stack(several) for several in zip(*found, strict=True))
        return stacks, (0,) * len(stacks)

    torch.library.register_vmap(f"flashgen::{name}", mapped, lib=library)
