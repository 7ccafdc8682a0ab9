"""Gradients of `flashgen.attention` on a GPU: all features, shapes and strides against float64, bits and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import flashgen
from flashgen.codegen.common_order import ALL_HEADS
from flashgen.core.config import Config
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Specialization
from flashgen.runtime.ops import serve
from tests.gpu.public import compile_ahead
from tests.gpu.training_cases import (
    FEATURES,
    HK,
    SK,
    SQ,
    B,
    D,
    H,
    assert_gradients,
    bias,
    dense_gradients,
    leaf,
    leaves_of,
    qkv,
    slopes,
)
from tests.runtime.dense_attention import dense

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNEXPLAINED = ("return_lse", "softmax_scale")


@pytest.fixture(autouse=True)
def fresh(generated_kernels: None) -> None:
    """Generated kernels only, and the same inputs in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead() -> None:
    """The kernels of all features in both directions, in as many processes as there are cores."""
    compile_ahead(served_pairs(), serve.device_at(0))


def served_pairs() -> Iterator[tuple[Specialization, Config]]:
    for make, fixed in itertools.product(FEATURES.values(), (False, True)):
        arguments = {name: value for name, value in make().items() if name not in UNEXPLAINED}
        for direction in ("forward", "backward"):
            shown = flashgen.explain(*qkv(), **arguments, direction=direction, deterministic=fixed)
            yield shown.specialization, shown.served.config


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_of_every_feature(name: str, deterministic: bool) -> None:
    for layout in ("bhsd", "bshd"):
        arguments = {**FEATURES[name](), "layout": layout, "deterministic": deterministic}
        assert_gradients(qkv(bshd=layout == "bshd"), arguments, lse=layout == "bshd")


@pytest.mark.parametrize("head_dim", [16, 32, 72, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_head_dimensions(head_dim: int, causal: bool) -> None:
    assert_gradients(qkv(head_dim=head_dim), {"causal": causal})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("batch", "nheads", "nheads_k", "seqlen", "head_dim"),
    [(3, 15, 15, 300, 128), (2, 24, 24, 300, 64), (2, 12, 12, 330, 256), (2, 12, 12, 330, 192), (4, 16, 8, 600, 128)],
)
def test_gradients_of_few_tiles_of_many_heads(
    batch: int, nheads: int, nheads_k: int, seqlen: int, head_dim: int, deterministic: bool
) -> None:
    inputs = qkv(batch, nheads, nheads_k, seqlen, seqlen, head_dim)
    arguments = {"causal": True, "deterministic": deterministic}
    served = flashgen.explain(*inputs, **arguments, direction="backward").served
    if served.config.family in ("hopper_backward_fused", "hopper_backward_split"):
        assert served.config["heads_per_group"] == ALL_HEADS
    assert_gradients(inputs, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_dtypes(dtype: str) -> None:
    for head_dim in (64, 128):
        assert_gradients(qkv(head_dim=head_dim, dtype=DTYPES[dtype]), {"causal": True})


def test_gradients_of_unequal_head_dimensions() -> None:
    assert_gradients(qkv(head_dim=192, head_dim_v=128), {"causal": True})


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2), (3, 6, 2, 1, 500), (1, 8, 1, 700, 64), (2, 2, 2, 128, 128), (1, 3, 3, 1025, 1023)]
)
def test_gradients_of_shapes(shape: tuple[int, ...]) -> None:
    for causal, head_dim in itertools.product((False, True), (64, 128)):
        assert_gradients(qkv(*shape, head_dim=head_dim), {"causal": causal})


def test_one_key_leaves_nothing_to_choose() -> None:
    q, k, v = qkv(seqlen_k=1)
    out = flashgen.attention(q, k, v)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert dq.abs().max() < 0.05
    assert dk.abs().max() < 0.05 * SQ
    expected = dout.double().sum(2, keepdim=True).unflatten(1, (HK, -1)).sum(2)
    torch.testing.assert_close(dv.double(), expected, atol=0.02, rtol=0.02)


def test_strides_that_no_descriptor_takes() -> None:
    base = leaf(B, 200, 3, H, 65)
    q, k, v = (base[:, :, i, :, 1:].transpose(1, 2) for i in range(3))
    out = flashgen.attention(q, k, v, causal=True)
    out.backward(dout := torch.randn_like(out))
    found = base.grad
    assert found is not None
    copies = [x.detach().requires_grad_() for x in (q, k, v)]
    truth = dense_gradients(copies, {"causal": True}, dout, None, torch.float64)
    for i, expected in enumerate(truth):
        torch.testing.assert_close(found[:, :, i, :, 1:].transpose(1, 2).double(), expected, atol=0.05, rtol=0.05)
    assert not found[..., 0].any()


def test_views_of_one_projection() -> None:
    packed = leaf(B, 200, 3, H, D)
    flashgen.attention(*packed.unbind(2), layout="bshd", causal=True).float().square().sum().backward()
    found, packed.grad = packed.grad, None
    dense(*(x.transpose(1, 2).double() for x in packed.unbind(2)), causal=True)[0].square().sum().backward()
    torch.testing.assert_close(found, packed.grad, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("which", range(1, 32))
def test_any_subset_of_inputs_may_require_gradients(which: int) -> None:
    inputs, arguments = qkv(), {"sinks": leaf(H, dtype=torch.float32), **bias(H, SQ, SK)}
    for number, tensor in enumerate([*inputs, *arguments.values()]):
        tensor.requires_grad_(bool(which >> number & 1))
    assert_gradients(inputs, arguments)


DOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded from one": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "expanded over heads": lambda x: x[:, :1].expand_as(x),
    "expanded over rows": lambda x: x[:, :, :1].expand_as(x),
    "other order": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension apart": lambda x: x.mT.contiguous().mT,
    "unaligned": lambda x: torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]],
    "padded": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("name", DOUTS)
def test_gradients_of_any_strides(name: str) -> None:
    inputs = qkv()
    out = flashgen.attention(*inputs, causal=True, deterministic=True)
    given = DOUTS[name](torch.randn_like(out))
    found = torch.autograd.grad(out, inputs, given, retain_graph=True)
    expected = torch.autograd.grad(out, inputs, given.contiguous())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_to_attend_to() -> None:
    for batch, rows, keys in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        inputs, sinks = qkv(batch=batch, seqlen_q=rows, seqlen_k=keys), leaf(H, dtype=torch.float32)
        out, lse = flashgen.attention(*inputs, sinks=sinks, return_lse=True)
        (out.float().sum() + lse.sum()).backward()
        assert all(x.grad is not None and not x.grad.any() for x in inputs)
        assert sinks.grad is not None
        assert sinks.grad.tolist() == [batch * rows if keys == 0 else 0.0] * H


@pytest.mark.parametrize("name", ["plain", "causal", "everything", "bias of keys", "bias"])
def test_the_same_bits_in_a_hundred_repeats(name: str) -> None:
    arguments = {**FEATURES[name](), "deterministic": True}
    inputs = qkv(nheads=8, nheads_k=4) if name in ("plain", "causal") else qkv()
    leaves = leaves_of(inputs, arguments)
    out = flashgen.attention(*inputs, **arguments)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_torch_s_switch_makes_it_deterministic() -> None:
    inputs = qkv(nheads_k=4, seqlen_q=1024, seqlen_k=1024)
    torch.use_deterministic_algorithms(True)
    try:
        grads = [torch.autograd.grad(flashgen.attention(*inputs).float().square().sum(), inputs) for _ in range(20)]
        shown = flashgen.explain(*inputs, direction="backward")
    finally:
        torch.use_deterministic_algorithms(False)
    assert shown.workload.deterministic
    assert all(torch.equal(one, other) for each in grads for one, other in zip(grads[0], each, strict=True))


def peak_bytes(seqlen: int) -> int:
    """The most memory of a forward and backward pass, beyond the inputs."""
    inputs = qkv(1, 8, 8, seqlen, seqlen, 128)
    dout = torch.randn_like(inputs[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flashgen.attention(*inputs, causal=True).backward(dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    peak_bytes(512)  # what the first launches of a process leave
    short, long = peak_bytes(16384), peak_bytes(32768)
    assert long < 2.1 * short
    tensor = 8 * 32768 * 128 * 2
    # out, dq, dk, dv, and dq in fp32; a matrix of the scores of one head alone would be 32 of these
    assert long < 7.5 * tensor


def test_what_has_no_gradient_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match="alibi_slopes have no gradient"):
        flashgen.attention(q, k, v, alibi_slopes=slopes().requires_grad_())
    (dq,) = torch.autograd.grad(flashgen.attention(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        dq.float().sum().backward()
    with pytest.raises(UnsupportedError, match="no kernel family serves"):
        flashgen.attention(*qkv(head_dim=520))
