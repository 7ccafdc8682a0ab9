"""Rotary positions in float64, of one head of one token at a time."""

from __future__ import annotations

import torch


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: int, *, interleaved: bool) -> torch.Tensor:
    """A head of one token in float64, turned column by column."""
    found, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        found[..., one] = x[..., one].double() * c - x[..., two].double() * s
        found[..., two] = x[..., one].double() * s + x[..., two].double() * c
    return found
