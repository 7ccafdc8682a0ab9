"""Memory of a backward pass: which gradients are copied, how those of the inputs lie, and what is kept for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.dense_attention import dense
from tests.runtime.training import DV, HK, SK, SQ, B, D, H, assert_gradients, double, leaf, qkv

pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")

DOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "contiguous": (torch.clone, False),
    "expanded from one": (lambda x: x[:1, :1, :1, :1].expand_as(x), True),
    "expanded over heads": (lambda x: x[:, :1].expand_as(x), False),
    "expanded over rows": (lambda x: x[:, :, :1].expand_as(x), False),
    "other order": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), False),
    "last dimension apart": (lambda x: x.mT.contiguous().mT, True),
    "unaligned": (lambda x: torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]], True),
    "padded": (lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]], False),
}


@pytest.mark.parametrize("name", DOUTS)
def test_a_gradient_of_any_strides_is_copied_only_if_it_must_be(name: str, emulated: EmulatedGpu) -> None:
    make, is_copied = DOUTS[name]
    q, k, v = qkv()
    out = flashgen.attention(q, k, v)
    given = make(torch.randn_like(out))
    found = torch.autograd.grad(out, (q, k, v), given)
    truth = [double(x) for x in (q, k, v)]
    expected = torch.autograd.grad(dense(*truth)[0], truth, given.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    assert (emulated.launched_backward[0].pointers["dout"] != given.data_ptr()) is is_copied
    assert emulated.planned_backward[0][0].aligned16, "one odd gradient does not cost the fast kernels"


def test_an_unaligned_call_copies_nothing(emulated: EmulatedGpu) -> None:
    q, k, v = (torch.cat([x, x[..., :1]], -1)[..., :-1].detach().requires_grad_() for x in qkv(head_dim_v=D))
    out = flashgen.attention(q, k, v)
    given = torch.randn(B, H, SQ, D + 1)[..., 1:]
    out.backward(given)
    assert emulated.launched_backward[0].pointers["dout"] == given.data_ptr()
    assert not emulated.planned_backward[0][0].aligned16


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_views_of_one_projection_get_dense_gradients(layout: str) -> None:
    packed = leaf(B, SQ, 3, H, D)
    seen: list[torch.Tensor] = []
    inputs = [x if layout == "bshd" else x.transpose(1, 2) for x in packed.unbind(2)]
    for tensor in inputs:
        tensor.register_hook(seen.append)
    flashgen.attention(*inputs, layout=layout, causal=True).square().sum().backward()
    truth = double(packed)
    views = [x.transpose(1, 2) for x in truth.unbind(2)]
    dense(*views, causal=True)[0].square().sum().backward()
    torch.testing.assert_close(packed.grad.double(), truth.grad, atol=1e-5, rtol=1e-4)
    assert [(x if layout == "bshd" else x.transpose(1, 2)).is_contiguous() for x in seen] == [True] * 3


def test_a_leaf_takes_its_gradient_without_a_copy(emulated: EmulatedGpu) -> None:
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv()]
    flashgen.attention(*tensors).square().sum().backward()
    for tensor, name in zip(tensors, ("dq", "dk", "dv"), strict=True):
        assert tensor.grad is not None
        assert tensor.grad.data_ptr() == emulated.launched_backward[0].pointers[name]
        assert tensor.grad.stride() == tensor.stride()


def test_an_expanded_key_gets_the_sum_of_its_gradients() -> None:
    q, _, _ = qkv()
    k, v = leaf(B, 1, SK, D), leaf(B, 1, SK, D)
    arguments = {"causal": True}
    assert_gradients([q, k.expand(B, H, SK, D), v.expand(B, H, SK, D)], arguments)
    flashgen.attention(q, k.expand(B, H, SK, D), v.expand(B, H, SK, D)).sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


STRIDES: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.empty(2, 6, 10, 16),
    "transposed": lambda: torch.empty(2, 10, 6, 16).transpose(1, 2),
    "packed": lambda: torch.empty(2, 10, 3, 6, 16)[:, :, 1].transpose(1, 2),
    "rows first": lambda: torch.empty(10, 2, 6, 16).permute(1, 2, 0, 3),
    "padded": lambda: torch.empty(2, 6, 10, 17)[..., 1:],
    "expanded heads": lambda: torch.empty(2, 1, 10, 16).expand(2, 6, 10, 16),
    "expanded rows": lambda: torch.empty(2, 6, 1, 16).expand(2, 6, 10, 16),
    "expanded batch": lambda: torch.empty(1, 6, 10, 16).expand(2, 6, 10, 16),
    "one head": lambda: torch.empty(2, 10, 1, 16).transpose(1, 2),
}


@pytest.mark.parametrize("name", STRIDES)
def test_a_gradient_is_dense_in_the_order_of_its_tensor(name: str) -> None:
    from flashgen.runtime.ops.outputs import dense_like

    tensor = STRIDES[name]()
    found = dense_like(tensor)
    assert found.shape == tensor.shape
    assert found.stride(3) == 1
    order = sorted(range(4), key=found.stride, reverse=True)
    assert found.permute(order).is_contiguous()
    with torch._subclasses.FakeTensorMode():
        assert dense_like(STRIDES[name]()).stride() == found.stride()


def test_saved_tensors_may_travel(emulated: EmulatedGpu) -> None:
    """Hooks may offload what is kept: q, k, v, output and LSE, and nothing of seqlen_q x seqlen_k."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def call(*inputs: torch.Tensor, **arguments: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return flashgen.attention(*inputs, **arguments)

    assert_gradients(qkv(bshd=True), {"layout": "bshd", "causal": True}, call=call)
    shapes = [(B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, DV), (B, SQ, H, DV), (B, H, SQ)]
    assert [tuple(tensor.shape) for tensor in kept] == shapes
