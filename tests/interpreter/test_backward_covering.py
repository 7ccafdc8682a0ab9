"""Every two values of every two factors meet in rendered backward kernels on a CPU; keys that no query sees are NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.core.workload import Specialization
from tests.covering import covering_array
from tests.interpreter.backward import check
from tests.interpreter.dense import Rules
from tests.tiers import first

KINDS = {"": "", "full": "full", "keys": "keys", "scattered": "full"}
CAP = 1.5
BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the array: a bias or a mask is "full", "keys", or "scattered" (a full one without alignment).

    `own` says whether a bias and a mask have values for each sequence and for each head. `loads` "unaligned" are
    pointer loads that nothing is known of.
    """

    family: str
    loads: str
    dtype: str
    dims: tuple[int, int]
    lengths: tuple[int, int]
    heads: tuple[int, int]
    heads_per_tile: int
    position: str
    offset: str
    softcap: bool
    alibi: bool
    bias: str
    mask: str
    own: tuple[bool, bool]

    @property
    def spec(self) -> Specialization:
        """What is compiled in."""
        causal, window = "causal" in self.position, "window" in self.position
        return Specialization(
            direction="backward",
            dtype=self.dtype,
            head_dim=self.dims[0],
            head_dim_v=self.dims[1],
            causal=causal,
            window=window,
            softcap=self.softcap,
            alibi=self.alibi,
            bias=KINDS[self.bias],
            mask=KINDS[self.mask],
            bias_grad=True,
            aligned16=self.loads != "unaligned",
            aligned_scores="scattered" not in (self.bias, self.mask),
            offset_tensor=self.offset == "tensor" and (causal or window or self.alibi),
        )

    @property
    def host(self) -> dict[str, object]:
        """Feature arguments of the call."""
        spec, generator = self.spec, torch.Generator().manual_seed(1)
        (seqlen_q, seqlen_k), nheads = self.lengths, self.heads[0]
        found: dict[str, object] = {}
        if spec.window:
            found["window"] = (17, None) if spec.causal else (33, 5)
        if self.softcap:
            found["softcap"] = CAP
        if self.alibi:
            found["alibi_slopes"] = torch.rand(nheads, generator=generator)
        if self.offset != "default" and (spec.causal or spec.window or self.alibi):
            shift = seqlen_k - seqlen_q - 7
            found["q_offset"] = torch.tensor([shift, 5], dtype=torch.int32) if spec.offset_tensor else shift
        dtype = torch.float16 if self.dtype == "fp16" else torch.float32
        if spec.bias:
            found["bias"] = self._keys(torch.randn(self._outer(spec.bias), generator=generator).to(dtype))
        if spec.mask:
            seen = torch.rand(self._outer(spec.mask), generator=generator) > 0.3
            seen[..., : seqlen_k // 3] = False
            found["mask"] = self._keys(seen)
        return found

    def _outer(self, kind: str) -> tuple[int, ...]:
        """The shape of a bias or a mask, with room for rows that are multiples of 16 bytes apart."""
        (seqlen_q, seqlen_k), nheads = self.lengths, self.heads[0]
        rows = seqlen_q if kind == "full" else 1
        return BATCH if self.own[0] else 1, nheads if self.own[1] else 1, rows, -(-seqlen_k // 8) * 16

    def _keys(self, values: torch.Tensor) -> torch.Tensor:
        """One value a key: every second one where they are not to be aligned."""
        return values[..., :: 1 if self.spec.aligned_scores else 2][..., : self.lengths[1]]


CASES = [
    Case(**row)  # type: ignore[arg-type]
    for row in covering_array(
        {
            "family": ("split", "fused"),
            "loads": ("pointer", "descriptor", "unaligned"),
            "dtype": ("fp16", "fp32"),
            "dims": ((16, 16), (24, 40), (80, 48)),
            "lengths": ((1, 70), (37, 70), (70, 37)),
            "heads": ((2, 2), (2, 1)),
            "heads_per_tile": (0, 1),
            "position": ("", "causal", "window", "causal-window"),
            "offset": ("default", "int", "tensor"),
            "softcap": (False, True),
            "alibi": (False, True),
            "bias": ("", "full", "keys", "scattered"),
            "mask": ("", "full", "keys", "scattered"),
            "own": ((False, False), (True, True), (False, True)),
        }
    )
]


@pytest.mark.parametrize("case", first(9, CASES), ids=lambda case: f"{case.family}-{case.loads}-{case.spec.key}")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_every_two_values_meet(case: Case) -> None:
    row = PORTABLE_BACKWARD_SPLIT if case.family == "split" else PORTABLE_BACKWARD_FUSED
    host = case.host
    rules = Rules(causal=case.spec.causal, **host)  # type: ignore[arg-type]
    check(
        row,
        case.spec.key,
        (BATCH, *case.heads, *case.lengths),
        rules,
        garbage=math.nan,
        host=host,
        loads="descriptor" if case.loads == "descriptor" else "pointer",
        split_d=case.dims == (80, 48),
        heads_per_tile=case.heads_per_tile,
    )
