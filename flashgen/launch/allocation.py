"""Memory of tensors by one call past torch's dispatcher, as the code of torch's compiler allocates it.

It takes 0.5 us where `empty_like` takes 0.9 and `new_empty` 1.1 to 1.8, from the same allocator and stream. A call of
training makes six tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape, torch.dtype]
"""Shape, strides in elements and dtype."""

Empty = Callable[[Shape, Shape, torch.dtype], torch.Tensor]
"""An uninitialised tensor of a layout."""

GUARDS: Any = torch._C._dynamo.guards


def empty_on_current() -> Empty:
    """What allocates on the current GPU."""
    found: Empty | None = getattr(GUARDS, "_empty_strided_cuda", None)  # no part of torch's interface
    return _general(torch.device("cuda")) if found is None else found


def empty_beside(tensor: torch.Tensor) -> Empty:
    """What allocates on the device of a tensor, which has to be the current one if it is a GPU."""
    return empty_on_current() if tensor.device.type == "cuda" else _general(tensor.device)


def elsewhere(tensor: torch.Tensor) -> Callable[[], bool] | None:
    """What says whether another GPU than that of a tensor is the current one; None where there is no other one."""
    if tensor.device.type != "cuda" or torch.cuda.device_count() == 1:
        return None
    index, current = tensor.get_device(), torch._C._cuda_getDevice
    return lambda: current() != index


def layout_of(tensor: torch.Tensor) -> Layout:
    """That of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def layout_of_view(shape: Shape, strides: Shape, dtype: torch.dtype, *, bshd: bool) -> Layout:
    """That of a tensor of a call from a view of it in (batch, head, sequence, head_dim) order."""
    (a, b, c, d), (e, f, g, h) = shape, strides
    return ((a, c, b, d), (e, g, f, h), dtype) if bshd else (shape, strides, dtype)


def _general(device: torch.device) -> Empty:
    def empty(shape: Shape, strides: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty
