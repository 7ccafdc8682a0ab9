"""Tensors to check in place of those of a call: the rules of the kernels, without their limits to dtypes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, overload

import torch

from flashgen.core.features.values import Features

WIDER = {torch.float32: (torch.float64,), torch.float16: (torch.float64, torch.float32)}
"""For the widest dtype that kernels take, those that are taken here as well."""


@overload
def stand_in(tensor: torch.Tensor, widest: torch.dtype) -> torch.Tensor: ...
@overload
def stand_in(tensor: None, widest: torch.dtype) -> None: ...
def stand_in(tensor: torch.Tensor | None, widest: torch.dtype) -> torch.Tensor | None:
    """A tensor like this one with the widest dtype that kernels take, if it has a wider one; it holds nothing."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype in WIDER[widest]:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=widest, device=tensor.device)
    return tensor


def stand_ins(features: Features) -> Features:
    """Features with float32 in place of float64, but in tensors for the caller's functions."""
    given = {field.name: getattr(features, field.name) for field in fields(features)}
    small: dict[str, Any] = {
        name: stand_in(value, torch.float32) for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    return replace(features, **small)


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """float32, or float64 for queries in float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
