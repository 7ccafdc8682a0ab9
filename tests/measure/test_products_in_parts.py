"""fp32 products in parts, by emulated tensor cores: why the gate of fp32 accepts them, on hard data as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashgen.core.record import Failure
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.measure.verify import check, oracle_of
from tests.tiers import every

Products = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

KEYS, BLOCK_N, HEAD_DIM = 512, 32, 128


def toward_zero(x: torch.Tensor) -> torch.Tensor:
    """fp64 to fp32 as tensor cores add: what does not fit is cut off."""
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


def added(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor, chunk: int) -> torch.Tensor:
    """`total` + a @ b with exact products, cut off behind each chunk of columns."""
    for i in range(0, a.shape[1], chunk):
        total = toward_zero(total.double() + a[:, i : i + chunk].double() @ b[i : i + chunk].double())
    return total


def tf32(x: torch.Tensor, half: int = 0) -> torch.Tensor:
    return ((x.view(torch.int32) + half) & -0x2000).view(torch.float32)


def three_of_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (a0, a1), (b0, b1) = ((high, tf32(x - high)) for x in (a, b) for high in [tf32(x, 0x1000)])
    total = torch.zeros(a.shape[0], b.shape[1])
    for left, right in ((a1, b0), (a0, b1), (a0, b0)):
        total = added(left, right, total, 4)
    return total


def six_of_bf16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (a0, a1, a2), (b0, b1, b2) = bf16_parts(a), bf16_parts(b)
    total = torch.zeros(a.shape[0], b.shape[1])
    for left, right in ((a1, b1), (a2, b0), (a0, b2), (a1, b0), (a0, b1), (a0, b0)):
        total = added(left, right, total, 8)
    return total


def bf16_parts(x: torch.Tensor) -> list[torch.Tensor]:
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16().float())
        x = x - parts[-1]
    return parts


def one_of_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return added(tf32(a, 0x1000), tf32(b, 0x1000), torch.zeros(a.shape[0], b.shape[1]), 4)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, products: Products
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-2 in fp32; the sum of a block of keys is added to the output in fp32, as Triton does it."""
    m, row_sum = torch.full((q.shape[0],), -torch.inf), torch.zeros(q.shape[0])
    out = torch.zeros(q.shape[0], v.shape[1])
    for n in range(0, len(k), BLOCK_N):
        s = products(q, k[n : n + BLOCK_N].T.contiguous()) * HEAD_DIM**-0.5
        m_new = torch.maximum(m, s.amax(1))
        p, alpha = (s - m_new[:, None]).exp(), (m - m_new).exp()
        row_sum = row_sum * alpha + p.sum(1)
        out = out * alpha[:, None] + products(p, v[n : n + BLOCK_N])
        m = m_new
    return out / row_sum[:, None], m + row_sum.log()


def passes(kind: str, products: Products) -> bool:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, HEAD_DIM, generator=generator) for n in (32, KEYS, KEYS))
    DATA_KINDS[kind].apply(q, k)
    out, lse = attention(q[0, 0], k[0, 0], v[0, 0], products)
    verdict = check(out[None, None], lse[None, None], oracle_of(q, k, v, q_offset=KEYS - 32))
    return not isinstance(verdict, Failure)


@pytest.mark.parametrize("kind", every(2, DATA_KINDS))
@pytest.mark.parametrize("products", [three_of_tf32, six_of_bf16], ids=["tf32x3", "bf16x6"])
def test_parts_pass_the_gate_of_fp32(kind: str, products: Products) -> None:
    assert passes(kind, products)


def test_one_product_of_tf32_does_not() -> None:
    assert not passes("randn", one_of_tf32)
