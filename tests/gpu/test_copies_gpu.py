"""q, k and v that are not aligned to 16 bytes: the bits of copies, also in graphs and compiled, and their time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.benchmark import Timer

import flashgen
from tests.runtime.layouts import odd, shifted

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor


ODD: dict[str, Callable[[Tensor], Tensor]] = {"address": shifted, "rows": odd}


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(2, heads, 2100, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
        for heads in (16, 4, 4)
    ]


def both_passes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out = flashgen.attention(q, k, v, causal=True, deterministic=True)
    return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ODD)
def test_both_passes_have_the_bits_of_aligned_tensors(kind: str, dtype: torch.dtype) -> None:
    aligned = inputs(dtype)
    assert flashgen.explain(*(ODD[kind](tensor.detach()) for tensor in aligned), causal=True).copies
    found = both_passes(*(ODD[kind](tensor.detach()).requires_grad_() for tensor in aligned))
    assert all(torch.equal(one, other) for one, other in zip(found, both_passes(*aligned), strict=True))


@pytest.mark.parametrize("kind", ODD)
def test_a_graph_copies_what_is_there_when_it_is_replayed(kind: str) -> None:
    q, k, v = (ODD[kind](tensor.detach()) for tensor in inputs())
    flashgen.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v)
    v.mul_(-2)
    graph.replay()
    assert torch.equal(out, flashgen.attention(q, k, v))


@pytest.mark.parametrize("kind", ODD)
def test_a_compiled_step_has_the_same_bits(kind: str) -> None:
    given = [ODD[kind](tensor.detach()).requires_grad_() for tensor in inputs()]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashgen.attention(q, k, v, causal=True, deterministic=True).float().square().sum()

    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(*given), given)
    assert all(torch.equal(*pair) for pair in zip(found, torch.autograd.grad(step(*given), given), strict=True))


@pytest.mark.alone
def test_copies_cost_little_of_a_long_call() -> None:
    aligned = [torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def milliseconds(tensors: list[Tensor]) -> float:
        timer = Timer("attend(*tensors)", globals={"attend": flashgen.attention, "tensors": tensors})
        return timer.blocked_autorange(min_run_time=0.5).median * 1e3

    times = [milliseconds(given) for given in (aligned, [shifted(tensor) for tensor in aligned])]
    assert times[1] < 1.5 * times[0]
