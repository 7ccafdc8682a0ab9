"""Calls like one of the last few, found by one question to torch: is everything about these tensors as it was?

Torch's compiler guards its code with just this question, and has it in C++: of each tensor its class, dtype, device,
shape, strides, whether it requires a gradient, and what torch's dispatcher would do for it (subclasses, transforms and
modes included). It takes a third of the time of a key of the memo with the same facts. Only addresses are left: those
of q, k, v and the output must be multiples of 16 bytes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.features.score_tensors import ALIGNMENT_BYTES
from flashgen.core.settings import settings
from flashgen.launch.decode_plan import Launch
from flashgen.runtime.ops.keys import are_plain, can_bypass_dispatcher

Tensors = tuple[torch.Tensor, ...]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

Again = Callable[[Tensors], Result | None]
"""Serves tensors like those that it was made for; None where these are others."""

RECENT: dict[tuple[Any, ...], tuple[Again, ...]] = {}
"""By what a call has beside its tensors, and which of them it has: what serves the last few layouts."""

MOST_LAYOUTS = 4
"""Of tensors of calls of one kind: each that does not fit costs a tenth of a call."""

MOST_KINDS = 256

NOTHING: tuple[Again, ...] = ()

_GUARDS: Any = torch._C._dynamo.guards
_QUESTION: Any = getattr(_GUARDS, "TensorGuards", None) if hasattr(_GUARDS, "_empty_strided_cuda") else None
"""Neither is part of torch's interface: without them every call makes its key."""


def remember(kind: tuple[Any, ...], again: Again) -> None:
    """Serve calls of a kind without a key, where their tensors are like those that `again` was made for."""
    known = RECENT.get(kind, NOTHING)
    if again in known:  # as where another GPU is the current one
        return
    if len(RECENT) >= MOST_KINDS:
        RECENT.clear()
    RECENT[kind] = (again, *known[: MOST_LAYOUTS - 1])


def make_again(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor | None, launch: Launch
) -> tuple[Callable[..., bool], Again] | None:
    """The question to tensors, and what serves those that fit; None where it would leave out a check.

    Args:
        tensors: those of the call that are not None, q, k and v first, in the order of the launch.
        out: what it wrote: all that such calls write will be laid out like it.
        lse: the LSE that it wrote, or None.
        launch: what served it.
    """
    q, k, v, *_ = tensors
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    index, only_device = q.get_device(), torch.cuda.device_count() == 1
    if (
        _QUESTION is None
        or addresses % ALIGNMENT_BYTES
        or q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or settings().checks
        or not can_bypass_dispatcher(q, k, v)
        or not are_plain(tensors)
        or not (only_device or index == torch._C._cuda_getDevice())
    ):
        return None
    fits = _QUESTION(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not fits(*tensors):  # as for a tensor that stands for two arguments
        return None
    again = _without_lse(fits, out, launch, index) if lse is None else _with_lse(fits, out, lse, launch, index)
    return fits, again


def with_others(tensors: Tensors, given: tuple[torch.Tensor | None, ...]) -> tuple[Tensors, int]:
    """The tensors of a call with those that few calls have, and which these are, as bits."""
    present = sum(1 << number for number, one in enumerate(given) if one is not None)
    return (*tensors, *[one for one in given if one is not None]), present


def _without_lse(fits: Any, out: torch.Tensor, launch: Launch, index: int) -> Again:
    empty, data_ptr, layout = _GUARDS._empty_strided_cuda, torch.Tensor.data_ptr, _layout(out)
    only_device, current = torch.cuda.device_count() == 1, torch._C._cuda_getDevice
    run, sized = launch

    def again(tensors: Tensors) -> Result | None:
        if not fits(*tensors) or not (only_device or current() == index):
            return None
        out: torch.Tensor = empty(*layout)
        pointers = (out.data_ptr(), *map(data_ptr, tensors))
        if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & (ALIGNMENT_BYTES - 1):
            return None
        run(sized, pointers, out, True)
        return out

    return again


def _with_lse(fits: Any, out: torch.Tensor, lse: torch.Tensor, launch: Launch, index: int) -> Again:
    empty, data_ptr, layout, lse_layout = _GUARDS._empty_strided_cuda, torch.Tensor.data_ptr, _layout(out), _layout(lse)
    only_device, current = torch.cuda.device_count() == 1, torch._C._cuda_getDevice
    run, sized = launch

    def again(tensors: Tensors) -> Result | None:
        if not fits(*tensors) or not (only_device or current() == index):
            return None
        out, lse = empty(*layout), empty(*lse_layout)
        pointers = (out.data_ptr(), lse.data_ptr(), *map(data_ptr, tensors))
        if (pointers[0] | pointers[2] | pointers[3] | pointers[4]) & (ALIGNMENT_BYTES - 1):
            return None
        run(sized, pointers, out, True)
        return out, lse

    return again


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
