"""q, k and v that are not aligned to 16 bytes: the bits of copies, also in graphs and compiled, and their time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import pad
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


def both_passes(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, columns: int | None = None
) -> tuple[Tensor, ...]:
    """Output and gradients of the sum of its first columns."""
    out = flashgen.attention(q, k, v, causal=True, deterministic=True, softmax_scale=softmax_scale)
    upstream = torch.zeros_like(out)
    upstream[..., :columns] = 1
    return out, *torch.autograd.grad(out, (q, k, v), upstream)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("dim", "dim_v"), [(102, 102), (36, 50), (64, 129)])
def test_padded_heads_have_the_bits_of_wider_ones(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(2, heads, 2100, columns, device="cuda", generator=generator).to(dtype).requires_grad_()
        for heads, columns in ((16, dim), (4, dim), (4, dim_v))
    ]
    step = 4 if dtype == torch.float32 else 8
    wider = [pad(tensor.detach(), (0, -tensor.shape[-1] % step)).requires_grad_() for tensor in given]
    assert flashgen.explain(*(tensor.detach() for tensor in given), causal=True).copies
    found = both_passes(*given)
    expected = both_passes(*wider, softmax_scale=dim**-0.5, columns=dim_v)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, other[..., : one.shape[-1]])


def test_packed_sequences_of_padded_heads_have_the_bits_of_wider_ones() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    ends = torch.tensor([0, 3000, 3100, 8000], device="cuda", dtype=torch.int32)
    named = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4900, "max_seqlen_k": 4900, "causal": True}
    given = [torch.randn(8000, 16, 100, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    found = []
    for tensors, scale in ((given, None), ([pad(tensor, (0, 4)) for tensor in given], 0.1)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = flashgen.attention_varlen(*leaves, **named, softmax_scale=scale, deterministic=True)
        upstream = torch.zeros_like(out)
        upstream[..., :100] = 1
        found.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for one, other in zip(*found, strict=True):
        assert one.shape == given[0].shape
        assert one.is_contiguous()
        assert torch.equal(one, other[..., :100])


@pytest.mark.alone
def test_copies_cost_little_of_a_long_call() -> None:
    aligned = [torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def milliseconds(tensors: list[Tensor]) -> float:
        timer = Timer("attend(*tensors)", globals={"attend": flashgen.attention, "tensors": tensors})
        return timer.blocked_autorange(min_run_time=0.5).median * 1e3

    times = [milliseconds(given) for given in (aligned, [shifted(tensor) for tensor in aligned])]
    assert times[1] < 1.5 * times[0]
