"""Calls like one of the last few, found by one question to torch in the place of a key of the memo.

Torch's compiler guards its code with just this question, and has it in C++: of each tensor its class, dtype, device,
shape, strides, whether a gradient of it is asked for, and what torch's dispatcher would do for it (subclasses,
transforms and modes included). Of three tensors it takes 0.5 us and of five 0.7, where keys with the same facts take
2.0 and 2.8. A model asks for the same few layouts layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.runtime.ops import serve
from flashgen.runtime.ops.keys import are_plain, can_bypass_dispatcher

Tensors = tuple[torch.Tensor, ...]
Fits = Callable[..., bool]
"""Whether tensors are like those that it was made for."""

Entry = tuple[Fits, Any]
"""A question, and what serves the tensors that fit: what the memo holds for them."""

RECENT: dict[int, tuple[Entry, ...]] = {}
"""The last few layouts of calls without features, by the flags of their keys."""

MOST_LAYOUTS = 2
"""Of calls with equal flags: each that does not fit costs 0.2 us."""

NOTHING: tuple[Entry, ...] = ()

GUARDS: Any = torch._C._dynamo.guards
_QUESTION: Any = getattr(GUARDS, "TensorGuards", None)
"""No part of torch's interface: without it every call makes its key."""

_ENTRIES: dict[Any, Entry | None] = {}
"""By what serves; None where no question can be asked. As many as the memo has, for they keep what that may forget."""


def question(tensors: Tensors, sizes: Any = None, strides: Any = None) -> Fits | None:
    """What says of tensors whether they are like these; None where it would leave out a check.

    Args:
        tensors: of a call whose rules hold, q, k and v first.
        sizes: the shape of each, with None for sizes that may be others; None are all as they are.
        strides: likewise.
    """
    q, k, v, *_ = tensors
    if _QUESTION is None or not can_bypass_dispatcher(q, k, v) or not are_plain(tensors):
        return None
    fits: Fits = _QUESTION(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return fits if fits(*tensors) else None  # a tensor that stands for two arguments never does


def remember(key: tuple[Any, ...], tensors: Tensors, run: Any) -> None:
    """Let calls like one that the memo has served be found in `RECENT`.

    Not the first call of its kind: a length that never comes back would pay for it.

    Args:
        key: of the memo; its flags say what is asked of the tensors, and how they are aligned.
        tensors: those that the key is made of.
        run: what the memo holds for it.
    """
    flags = key[0]
    entry = _ENTRIES.get(run)
    # the same layouts may be other tensors to torch, as those of inference mode
    is_new = (entry is None and run not in _ENTRIES) or (entry is not None and not entry[0](*tensors))
    if is_new:
        if len(_ENTRIES) >= serve.MEMO_LIMIT:
            _forget()
        fits = question(tensors)
        entry = _ENTRIES[run] = None if fits is None else (fits, run)
    if entry is not None:
        RECENT[flags] = (entry, *RECENT.get(flags, NOTHING)[: MOST_LAYOUTS - 1])
    # forgotten by another thread since the memo was asked: nor may it be found sooner
    if (serve.MEMO.get(key) is not run) if is_new else (run not in _ENTRIES):
        _forget()


def _forget() -> None:
    """Forget what serves before where it is found, so that what is remembered meanwhile is seen to be forgotten."""
    _ENTRIES.clear()
    RECENT.clear()


serve.FORGETTING.append(_forget)
