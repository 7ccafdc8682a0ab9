"""Tensors to check in place of those of a call: the rules of the kernels, without their limits to dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, overload

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from flashgen.core.features.values import Features
from flashgen.runtime.ops import recording
from flashgen.runtime.ops.calls import Call

WIDER = {torch.float32: (torch.float64,), torch.float16: (torch.float64, torch.float32)}
"""For the widest dtype that kernels take, those that are taken here as well."""


@overload
def stand_in(tensor: torch.Tensor, widest: torch.dtype) -> torch.Tensor: ...
@overload
def stand_in(tensor: None, widest: torch.dtype) -> None: ...
def stand_in(tensor: torch.Tensor | None, widest: torch.dtype) -> torch.Tensor | None:
    """A tensor like this one that kernels take, which holds nothing; the tensor itself if they take it.

    It has the widest dtype that kernels take, if the tensor has a wider one, and memory, which a tensor inside of
    `torch.func` has not.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    is_wider = tensor.dtype in WIDER[widest]
    if not is_wider and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    dtype = widest if is_wider else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def stand_ins(features: Features) -> Features:
    """Features with float32 in place of float64, but in tensors for the caller's functions."""
    given = {field.name: getattr(features, field.name) for field in fields(features)}
    small: dict[str, Any] = {
        name: stand_in(value, torch.float32) for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    return replace(features, **small)


def check_as_kernels_do(call: Callable[[], Call]) -> None:
    """The rules of a kernels' call, which is recorded as one that the reference computes.

    Args:
        call: makes it of stand-ins, outside of the transforms of `torch.func`, which would wrap them.

    Raises:
        WorkloadError, UnsupportedError: the call breaks a rule.
    """
    with temporarily_clear_interpreter_stack():
        checked = call().checked()
    recording.computed_by_reference(lambda: checked.workload)


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """float32, or float64 for queries in float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
