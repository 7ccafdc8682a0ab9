"""From the `Features` of a call to the arguments of a kernel: window edges, softcap factors, and tensors by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from flashgen.core.errors import LaunchError
from flashgen.launch.feature_values import Features, clamp_window

LOG2E = math.log2(math.e)

NO_FEATURES = Features()

WINDOW = ("window_left", "window_right")
SOFTCAP = ("softcap_rate", "softcap_scale_log2")
FAR_FEATURES = frozenset({*WINDOW, "AlibiSlopes"})
"""Parameters of kernels whose scores depend on query offsets beyond the lengths."""

_TENSORS: dict[str, Callable[[Features], torch.Tensor | None]] = {
    "AlibiSlopes": lambda features: features.alibi_slopes,
    "Sinks": lambda features: features.sinks,
    "Bias": lambda features: features.bias,
    "Mask": lambda features: features.mask,
    "PartialCounts": lambda features: features.block_mask.partial_counts if features.block_mask else None,
    "PartialIndices": lambda features: features.block_mask.partial_indices if features.block_mask else None,
    "FullCounts": lambda features: features.block_mask.full_counts if features.block_mask else None,
    "FullIndices": lambda features: features.block_mask.full_indices if features.block_mask else None,
}


def window_edges(features: Features, seqlen_q: int, seqlen_k: int, *, causal: bool) -> tuple[int, int]:
    """`window_left` and `window_right`; a causal mask is a right edge of 0."""
    left, right = features.window
    return clamp_window((left, 0 if causal else right), seqlen_q, seqlen_k)


def softcap_factors(features: Features, softmax_scale: float) -> tuple[float, float]:
    """`softcap_rate` and `softcap_scale_log2`.

    Raises:
        LaunchError: the call has no softcap.
    """
    if not features.softcap:
        raise LaunchError(f"a kernel with a softcap is launched with one above 0, got {features.softcap}")
    return 2 * LOG2E * softmax_scale / features.softcap, 2 * LOG2E * features.softcap


def arguments(
    names: Set[str], features: Features, softmax_scale: float, scalars: Mapping[str, int], *, causal: bool
) -> dict[str, Any]:
    """What the parameters of features among `names` are bound to; `scalars` has the lengths.

    Raises:
        LaunchError: the features do not have what a kernel with these parameters reads.
    """
    found: dict[str, Any] = {name: tensor_of(name)(features) for name in names if is_tensor(name)}
    if not names.isdisjoint(WINDOW):
        edges = window_edges(features, scalars["seqlen_q"], scalars["seqlen_k"], causal=causal)
        found |= zip(WINDOW, edges, strict=True)
    if not names.isdisjoint(SOFTCAP):
        found |= zip(SOFTCAP, softcap_factors(features, softmax_scale), strict=True)
    return found


def is_tensor(name: str) -> bool:
    """Whether a parameter of the launch vocabulary is a tensor of the features."""
    return name in _TENSORS or _aux_number(name) is not None


def tensor_of(name: str) -> Callable[[Features], torch.Tensor]:
    """What finds the tensor of a parameter in the features of a call, or raises `LaunchError`."""
    number = _aux_number(name)

    def find(features: Features) -> torch.Tensor:
        found = _TENSORS[name](features) if number is None else next(iter(features.aux[number:]), None)
        if found is None:
            raise LaunchError(f"the kernel reads {name}, and the features of the call have none")
        return found

    return find


def _aux_number(name: str) -> int | None:
    number = name.removeprefix("Aux")
    return int(number) if number != name and number.isdecimal() else None
