"""What a mask function of transformers means: its closures, read back as a window and as packed sequences.

transformers builds a mask as a Python function of (batch, head, query, key), from parts that it joins with `and_masks`.
A function that has a part unknown here means nothing, and its mask is made as a tensor, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from flashgen.core.features.values import Window

Tensor = torch.Tensor
MaskFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Which keys a query sees beside padding: those within a window around it, in its own sequence.

    `window` has inclusive edges, as in `flashgen.attention`; causal is a right edge of 0. `sequences` numbers the
    tokens of packed sequences, (batch, seqlen). `is_shifted` says that positions are counted from their starts.
    """

    window: Window = (None, None)
    sequences: Tensor | None = None
    is_shifted: bool = False


def read(function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function, or None where it is no pattern."""
    found = _read(function)
    if found is None or (found.is_shifted and found.sequences is None):
        return None
    return found


def _read(function: MaskFunction) -> Pattern | None:
    if function is masking_utils.causal_mask_function:
        return Pattern(window=(None, 0))
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    rule = _RULES.get(getattr(function, "__qualname__", "").partition(".<locals>")[0])
    return None if rule is None else rule(**_enclosed(function))


def _enclosed(function: MaskFunction) -> dict[str, Any]:
    """The variables that a nested function has from around it."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _joined(mask_functions: tuple[MaskFunction, ...]) -> Pattern | None:
    """What all of some functions leave."""
    parts = [_read(function) for function in mask_functions]
    left: int | None = None
    right: int | None = None
    sequences, is_shifted = None, False
    for part in parts:
        if part is None or (part.sequences is not None and sequences is not None):
            return None
        left, right = _nearer(left, part.window[0]), _nearer(right, part.window[1])
        sequences = part.sequences if sequences is None else sequences
        is_shifted = is_shifted or part.is_shifted
    return Pattern(window=(left, right), sequences=sequences, is_shifted=is_shifted)


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _behind(sliding_window: object) -> Pattern | None:
    """In transformers the query itself counts: a window of 1 is the query alone."""
    return Pattern(window=(sliding_window - 1, None)) if type(sliding_window) is int and sliding_window > 0 else None


def _around(sliding_window: object) -> Pattern | None:
    if type(sliding_window) is not int or sliding_window < 0:
        return None
    return Pattern(window=(sliding_window, sliding_window))


def _packed(packed_sequence_mask: Tensor) -> Pattern:
    return Pattern(sequences=packed_sequence_mask)


def _shifted(mask_function: MaskFunction, position_ids: Tensor) -> Pattern | None:
    """Within a sequence positions rise by one, so a window around positions is one around places."""
    inner = _read(mask_function)
    if inner is None or inner.sequences is not None:
        return None
    return Pattern(window=inner.window, is_shifted=True)


_RULES: dict[str, Callable[..., Pattern | None]] = {
    "and_masks": _joined,
    "sliding_window_overlay": _behind,
    "sliding_window_bidirectional_overlay": _around,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _shifted,
}
"""What reads the inner function of each of transformers' functions, by the names of the variables that it encloses."""
