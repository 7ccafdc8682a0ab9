"""Calls like one of the last few, found by one question to torch: is everything about these tensors as it was?

The question is that of `flashgen.runtime.ops.recent`. Only addresses are left: those of q, k, v and the output must be
multiples of 16 bytes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.settings import settings
from flashgen.launch.allocation import empty_on_current, layout_of
from flashgen.launch.decode_plan import Launch
from flashgen.runtime.ops import recent

Kind = tuple[Any, ...]
"""What a call has beside its tensors, and which of them it has."""

Tensors = tuple[torch.Tensor, ...]
"""Those of a call that are not None, q, k and v first, in the order of the launch."""

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

Again = Callable[[Tensors], Result | None]
"""Serves tensors like those that it was made for; None where these are others."""

RECENT: dict[Kind, tuple[Again, ...]] = {}
"""What serves the last few layouts of tensors, by the kind of the call."""

MOST_LAYOUTS = 2
"""Of tensors of calls of one kind: each that does not fit costs a tenth of a call."""

MOST_KINDS = 256

NOTHING: tuple[Again, ...] = ()


class Ready:
    """What serves calls of one layout: a launch, and what serves those like the last one without a key."""

    __slots__ = ("_again", "launch")

    def __init__(self, launch: Launch) -> None:
        """Keep a launch."""
        self.launch = launch
        self._again: tuple[Callable[..., bool], Again] | None = None

    def remember(self, kind: Kind, tensors: Tensors, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Let calls like one that was served be found in `RECENT`, where that leaves out no check.

        Args:
            kind: of the call.
            tensors: its tensors.
            out: what it wrote: all that such calls write will be laid out like it.
            lse: the LSE that it wrote, or None.
        """
        # the same layouts may be other tensors to torch, as those of inference mode
        if self._again is None or not self._again[0](*tensors):
            self._again = _made(tensors, out, lse, self.launch)
        known = RECENT.get(kind, NOTHING)
        if self._again is None or self._again[1] in known:  # as where another GPU is the current one
            return
        if len(RECENT) >= MOST_KINDS:
            RECENT.clear()
        RECENT[kind] = (self._again[1], *known[: MOST_LAYOUTS - 1])


def question(tensors: Tensors, sizes: Any = None, strides: Any = None) -> Callable[..., bool] | None:
    """What says of tensors whether they are like these; None where it would leave out a check.

    Args:
        tensors: those of a call whose rules hold.
        sizes: the shape of each, with None for sizes that may be others; None are all as they are.
        strides: likewise.
    """
    q, k, v, *_ = tensors
    if q.requires_grad or k.requires_grad or v.requires_grad or settings().checks:
        return None
    return recent.question(tensors, sizes, strides)


def with_others(tensors: Tensors, given: tuple[torch.Tensor | None, ...]) -> tuple[Tensors, int]:
    """The tensors of a call with those that few calls have, and which these are, as bits."""
    present = sum(1 << number for number, one in enumerate(given) if one is not None)
    return (*tensors, *[one for one in given if one is not None]), present


def _made(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor | None, launch: Launch
) -> tuple[Callable[..., bool], Again] | None:
    q, k, v, *_ = tensors
    index, only_device = q.get_device(), torch.cuda.device_count() == 1
    if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % ALIGNMENT_BYTES:
        return None
    if not (only_device or index == torch._C._cuda_getDevice()):
        return None
    fits = question(tensors)
    if fits is None:
        return None
    return fits, _without_lse(fits, out, launch, index) if lse is None else _with_lse(fits, out, lse, launch, index)


def _without_lse(fits: Any, out: torch.Tensor, launch: Launch, index: int) -> Again:
    empty, data_ptr, layout = empty_on_current(), torch.Tensor.data_ptr, layout_of(out)
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
    empty, data_ptr, layout, lse_layout = empty_on_current(), torch.Tensor.data_ptr, layout_of(out), layout_of(lse)
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
