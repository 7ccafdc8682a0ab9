"""Kinds of data: what else q and k may be beside normal random numbers, for kernels whose time depends on it.

A kernel of online softmax may be fast because scores seldom grow: one that keeps the first maximum of a row computes a
tile again where they do (docs/decisions/row-sums.md). Random numbers of standard deviation 1 never show it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Workload

LEVEL = 16.0
"""What every query holds in its first column where scores follow the keys: a power of two, exact in every dtype."""

PEAK_KEY = 3
"""Near the beginning, as an attention sink: a causal kernel that begins at the diagonal meets it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """One row of `DATA_KINDS`: normal random q and k, and then in this order what is not 0 or 1.

    Attributes:
        gain: a factor on q: the standard deviation of scores at the usual scale.
        peak: how far one key's scores are above all others, in natural units.
        rise: by how much scores rise from the last key to the first, in natural units: in the order in which a causal
            kernel meets keys from the diagonal down to key 0.
        meaning: words for tables.
    """

    gain: float = 1.0
    peak: float = 0.0
    rise: float = 0.0
    meaning: str

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Change normal random q (..., seqlen_q, head_dim) and k (..., seqlen_k, head_dim) in place.

        A score of natural units is meant at the usual scale, head_dim ** -0.5. What keys get is rounded to bf16 in
        every dtype, so that products of no dtype and no tensor core round it.
        """
        if self.gain != 1.0:
            q.mul_(self.gain)
        if not (self.peak or self.rise) or not k.numel():
            return
        seqlen_k, head_dim = k.shape[-2:]
        unit = head_dim**0.5 / LEVEL
        ramp = torch.linspace(self.rise, 0.0, seqlen_k, device=k.device)
        ramp[min(PEAK_KEY, seqlen_k - 1)] += self.peak
        q[..., 0] = LEVEL
        k[..., 0] = (unit * ramp).bfloat16().to(k.dtype)


NORMAL = "randn"
DATA_KINDS: dict[str, DataKind] = {
    NORMAL: DataKind(meaning="normal random numbers"),
    "std8": DataKind(gain=8.0, meaning="scores of standard deviation 8"),
    "std20": DataKind(gain=20.0, meaning="scores of standard deviation 20"),
    "peak": DataKind(peak=60.0, meaning="one key 60 above the rest"),
    "rising": DataKind(rise=200.0, meaning="scores that rise by 200 towards the first keys"),
}
"""By name; all but the first are hard."""

HARD_KINDS = tuple(name for name in DATA_KINDS if name != NORMAL)


def data_kind(name: str) -> DataKind:
    """The row of a name.

    Raises:
        WorkloadError: there is no such kind.
    """
    if name not in DATA_KINDS:
        raise WorkloadError(f"a kind of data is one of {', '.join(DATA_KINDS)}, got {name!r}")
    return DATA_KINDS[name]


def hard_kinds(dtype: str) -> tuple[str, ...]:
    """The hard data that kernels of a dtype are judged on.

    None for TF32: tensor cores drop 13 bits of q and k there, so scores of such sizes are off by what changes their
    weights by per cents, in eager attention too, and a comparison says nothing.
    """
    return () if dtype == "tf32" else HARD_KINDS


def hard_kind(workload: Workload) -> str | None:
    """The hard data that the last race of a workload's search is run on, beside normal data.

    None for TF32, for decoding, whose kernels take the same time on all data, and for packed sequences, which are timed
    on profiles of lengths.

    Scores that rise are met by the first maximum at its worst wherever a row sees most of the keys before it, at every
    length, and make references follow at the most steps (docs/experiments/row-sums.md). Behind a window a row sees too
    little of the rise.
    """
    if workload.has_profiles or not hard_kinds(workload.dtype):
        return None
    windowed = workload.window_left is not None or workload.window_right is not None
    return "std20" if windowed else "rising"
