"""q, k and v that are not aligned to 16 bytes: kernels get copies where they have much to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

import flashgen
from flashgen.codegen.families import default_config
from flashgen.core import input_copies
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.runtime.ops import serve
from tests.fakes.gpu import EmulatedGpu, FakeGpu, OnGpu
from tests.runtime.ladders import Ladder
from tests.runtime.layouts import odd, shifted

H200 = find_device("h200")
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
    monkeypatch.setattr(input_copies, "LEAST_COPIED_FLOPS", 1)


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
        assert out.stride() == torch.empty_like(called[0]).stride(), "what torch.compile was promised"
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


def wide(dim: int, dim_v: int, *, requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    shapes = ((2, 4, 256, dim), (2, 2, 256, dim), (2, 2, 256, dim_v))
    return [torch.randn(*shape, generator=generator).bfloat16().requires_grad_(requires_grad) for shape in shapes]


DOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "as the output": torch.ones_like,
    "in another order": lambda out: torch.ones_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
    "expanded": lambda out: torch.ones(1).to(out.dtype).expand(out.shape),
}


@pytest.mark.parametrize("dout", DOUT)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("dim", "dim_v"), [(36, 36), (40, 20), (20, 41)])
def test_heads_of_no_multiple_of_16_bytes_are_padded(
    emulated: EmulatedGpu, dim: int, dim_v: int, layout: str, dout: str
) -> None:
    """With zeros, and with the scale of the heads that there are; results are laid out as without copies."""
    leaves = wide(dim, dim_v, requires_grad=True)
    called = [tensor.transpose(1, 2) if layout == "bshd" else tensor for tensor in leaves]
    with filled_memory():
        out, lse = flashgen.attention(*called, causal=True, layout=layout, return_lse=True)
        upstream = DOUT[dout](out)
        gradients = torch.autograd.grad(out, leaves, upstream)
    columns = [-(-each // 8) * 8 for each in (dim, dim_v)]
    for spec, _, geometry, _ in (*emulated.planned, *emulated.planned_backward):
        assert spec.aligned16
        assert [spec.head_dim, spec.head_dim_v] == columns
        assert [geometry.tensor(name)[0][3] for name in ("q", "o")] == columns
    assert len(emulated.planned) == len(emulated.planned_backward) == 1
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT * dim**-0.5
    scores = scores.masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), float("-inf"))
    wanted = scores.softmax(-1) @ exact[2].repeat_interleave(2, 1)
    expected = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    found = out.transpose(1, 2) if layout == "bshd" else out
    for one, other in zip((found, lse, *gradients), (wanted, scores.logsumexp(-1), *expected), strict=True):
        assert torch.isfinite(one).all()
        assert (one.double() - other).norm() < 1e-2 * other.norm()
    if dim == dim_v:
        assert out.stride() == torch.empty_like(called[0]).stride()
    assert out.stride(-1) == 1
    assert out._base is None or out._base.numel() == out.numel(), "no part of wider memory"
    assert [each.stride() for each in gradients] == [torch.empty_like(leaf).stride() for leaf in leaves]


def test_a_scale_of_the_call_is_kept_where_heads_are_padded(emulated: EmulatedGpu) -> None:
    given = wide(36, 36)
    out = flashgen.attention(*given, softmax_scale=0.5)
    assert not torch.equal(out, flashgen.attention(*given))
    assert [launched.scale for launched in emulated.launched] == [0.5, 36**-0.5]


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Uninitialised memory is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_config_that_is_asked_for_gets_no_copies(gpu: FakeGpu, ladder: Ladder) -> None:
    given = on_gpu([shifted(tensor) for tensor in inputs()])
    assert flashgen.explain(*given).copies
    pointers = default_config(Specialization.parse("fwd-bf16-d64-unaligned"), H200)
    assert not flashgen.explain(*given, config=pointers).copies


def test_calls_that_are_copied_open_no_sizes(gpu: FakeGpu) -> None:
    """The short way to a new length looks at no address, and copies nothing."""
    for seqlen in range(256, 321, 16):
        flashgen.attention(*on_gpu([shifted(tensor) for tensor in inputs(seqlen)]))
    assert len(gpu.planned) == 5
    assert not serve._OPEN
