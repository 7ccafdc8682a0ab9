"""q, k and v that are not aligned to 16 bytes: kernels get copies where they have much to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashgen
from flashgen.runtime.ops import calls, serve
from tests.fakes.gpu import EmulatedGpu, FakeGpu, OnGpu
from tests.runtime.ladders import Ladder
from tests.runtime.layouts import odd, shifted

Tensor = torch.Tensor
Odd = Callable[[Tensor], Tensor]

ODD: dict[str, Odd] = {
    "address": shifted,
    "rows": odd,
    "swapped rows": lambda x: odd(x.transpose(1, 2)).transpose(1, 2),
    "expanded": lambda x: shifted(x[:, :1]).expand(x.shape),
}


def inputs(seqlen: int = 256, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen)
    return [torch.randn(2, heads, seqlen, dim, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.fixture(autouse=True)
def small_calls_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LEAST_COPIED_FLOPS", 1)


def on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.as_subclass(OnGpu) for tensor in tensors]


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("kind", ODD)
def test_both_passes_are_those_of_aligned_tensors(emulated: EmulatedGpu, kind: str, number: int, bshd: bool) -> None:
    """The emulated kernels refuse memory that is not aligned as they were told."""
    layout = "bshd" if bshd else "bhsd"
    found = []
    for make in (lambda x: x, ODD[kind]):
        given = inputs()
        given[number] = make(given[number][:, :1].expand(given[number].shape) if kind == "expanded" else given[number])
        leaves = [tensor.requires_grad_() for tensor in given]
        called = [tensor.transpose(1, 2) if bshd else tensor for tensor in leaves]
        out = flashgen.attention(*called, causal=True, layout=layout)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found.append((out, *gradients))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert [spec.aligned16 for spec, *_ in (*emulated.planned, *emulated.planned_backward)] == [True] * 4


def test_a_gradient_of_a_bias_comes_with_copies(emulated: EmulatedGpu) -> None:
    bias = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found = []
    for make in (lambda x: x, ODD["swapped rows"]):
        leaves = [make(tensor).requires_grad_() for tensor in inputs()]
        own = bias.clone().requires_grad_()
        out = flashgen.attention(*leaves, bias=own)
        found.append((out, *torch.autograd.grad(out, [*leaves, own], torch.ones_like(out))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_each_call_copies_what_is_there_then(emulated: EmulatedGpu) -> None:
    q, k, v = (shifted(tensor) for tensor in inputs())
    first = flashgen.attention(q, k, v)
    v.mul_(2)
    assert torch.equal(flashgen.attention(q, k, v), first * 2)
    assert len(emulated.planned) == 1


def test_what_copies_do_not_mend_is_not_copied(gpu: FakeGpu, ladder: Ladder) -> None:
    """Rows that are no multiples of 16 bytes; a config that is asked for."""
    flashgen.attention(*on_gpu([shifted(tensor) for tensor in inputs(dim=36)]))
    given = on_gpu([shifted(tensor) for tensor in inputs()])
    shown = flashgen.explain(*given)
    assert shown.copies
    assert [spec.aligned16 for spec, *_ in gpu.planned] == [False]
    pointers = next(config for _, config, *_ in gpu.planned if config.family == "portable_forward")
    assert not flashgen.explain(*given, config=pointers).copies


def test_calls_that_are_copied_open_no_sizes(gpu: FakeGpu) -> None:
    """The short way to a new length looks at no address, and copies nothing."""
    for seqlen in range(256, 321, 16):
        flashgen.attention(*on_gpu([shifted(tensor) for tensor in inputs(seqlen)]))
    assert len(gpu.planned) == 5
    assert not serve._OPEN
