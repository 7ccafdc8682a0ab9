"""A tanh that is right to 11 bits: the gate accepts outputs of 16 bits that come from it, and no LSE does."""

from __future__ import annotations

import pytest
import torch

from flashgen.core.features.values import Features
from flashgen.core.record import Failure
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.measure.verify import check, oracle_of

KEYS, HEAD_DIM = 768, 128


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float, error: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32 with rounded weights; each tanh is off by up to `error` of itself."""
    generator = torch.Generator().manual_seed(5)
    tanh = (q.double() @ k.double().mT * (HEAD_DIM**-0.5 / cap)).float().tanh()
    # tanh.approx.f32 returns 11 significant bits or so
    tanh *= 1 + error * (2 * torch.rand(tanh.shape, generator=generator) - 1)
    s = cap * tanh
    m = s.amax(-1, keepdim=True)
    p = (s - m).exp()
    row_sum = p.sum(-1, keepdim=True)
    return ((p.to(q.dtype).float() @ v.float()) / row_sum).to(q.dtype), (m + row_sum.log())[..., 0]


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("cap", [20.0, 50.0, 400.0])
def test_outputs_of_bf16_pass_the_gate_and_the_lse_does_not(cap: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, HEAD_DIM, generator=generator) for n in (64, KEYS, KEYS))
    DATA_KINDS[kind].apply(q, k)
    q, k, v = (each.bfloat16() for each in (q, k, v))
    expected = oracle_of(q, k, v, q_offset=KEYS - 64, features=Features(softcap=cap))
    out, lse = attention(q, k, v, cap, 2.0**-11)
    verdict = check(out, None, expected)
    assert not isinstance(verdict, Failure), str(verdict)
    assert not isinstance(check(*attention(q, k, v, cap, 0.0), expected), Failure)
    if kind not in ("randn", "rising"):
        assert isinstance(check(out, lse, expected), Failure)
