"""Random masks of keys, in every form that a kernel may treat apart: padding at an end or both, holes, few keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

VISIBLE_SHARE = 0.75
"""With holes, so many of the keys between a sequence's first and last visible one are visible."""

Axes = tuple[int, int]
"""How many batch elements and heads have a mask of their own."""

Maker = Callable[[Axes, int, torch.Generator], torch.Tensor]


def make_key_mask(form: str, axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    """A boolean mask (batch, heads, 1, seqlen_k) of one of `FORMS`, on the generator's device."""
    return FORMS[form](axes, seqlen_k, generator)[:, :, None, :]


def _end(axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    """Padding at the end of each sequence, which has at least half of the keys and one of them."""
    visible = _integers(seqlen_k // 2, seqlen_k + 1, axes, generator).clamp_min_(1)
    return _keys(seqlen_k, generator) < visible


def _start(axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    return _end(axes, seqlen_k, generator).flip(-1)


def _ends(axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    """Padding before and behind, most of a sequence in all: whole blocks of keys at either end."""
    first = _integers(0, seqlen_k // 2 + 1, axes, generator)
    length = _integers(1, seqlen_k // 4 + 2, axes, generator)
    keys = _keys(seqlen_k, generator)
    return (keys >= first) & (keys < first + length)


def _holes(axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    shown = torch.rand((*axes, seqlen_k), generator=generator, device=generator.device) < VISIBLE_SHARE
    return shown & _end(axes, seqlen_k, generator) & _start(axes, seqlen_k, generator)


def _one(axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    return _keys(seqlen_k, generator) == _integers(0, seqlen_k, axes, generator)


def _none(axes: Axes, seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    return torch.zeros((*axes, seqlen_k), dtype=torch.bool, device=generator.device)


FORMS: dict[str, Maker] = {
    "end": _end,
    "start": _start,
    "ends": _ends,
    "holes": _holes,
    "one": _one,
    "none": _none,
}


def _keys(seqlen_k: int, generator: torch.Generator) -> torch.Tensor:
    return torch.arange(seqlen_k, device=generator.device)


def _integers(low: int, high: int, axes: Axes, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, (*axes, 1), generator=generator, device=generator.device)
