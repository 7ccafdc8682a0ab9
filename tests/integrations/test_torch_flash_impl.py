"""ATen's flash operators by flashgen, reached by torch's dispatcher and its autograd, for tensors on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    varlen,
)

from flashgen import reference
from flashgen.core.errors import UnsupportedError
from flashgen.integrations.torch import register_flash_impl
from flashgen.integrations.torch.flash_impl import override
from tests.integrations.ops_on_cpu import ops_on_cpu

Tensor = torch.Tensor
aten = torch.ops.aten


@pytest.fixture
def overridden() -> Iterator[None]:
    with ops_on_cpu():
        handle = override("CPU")
        yield
        handle.remove()


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)]
    return [x.requires_grad_() for x in made]


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("overridden")
def test_the_operators_of_sdpa() -> None:
    inputs = leaves((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    out, lse, _, _, max_q, max_k, state, _, debug = aten._scaled_dot_product_flash_attention(
        *inputs, is_causal=True, scale=0.3
    )
    expected, sums = reference.attention(*inputs, causal=True, softmax_scale=0.3, return_lse=True)
    torch.testing.assert_close(lse, sums)
    assert (max_q, max_k, state.dtype, tuple(state.shape), debug.numel()) == (5, 7, torch.uint64, (2,), 0)
    assert_same(out, expected, inputs)
    with pytest.raises(UnsupportedError, match=r"does not support dropout_p, got 0\.5"):
        aten._scaled_dot_product_flash_attention(*inputs, 0.5)


@pytest.mark.usefixtures("overridden")
def test_dense_rows_with_a_window() -> None:
    inputs = leaves((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    found = aten._flash_attention_forward(
        *inputs, None, None, 5, 7, 0.0, False, False, window_size_left=2, window_size_right=1
    )
    expected = reference.attention(*inputs, layout="bshd", window=(2, 1), return_lse=True)
    torch.testing.assert_close(tuple(found[:2]), expected)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="block_table"):
        aten._flash_attention_forward(*inputs, None, None, 5, 7, 0.0, False, False, block_table=table)


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    inputs = leaves((9, 4, 8), (11, 4, 8), (11, 4, 8))
    ends = [torch.tensor(each, dtype=torch.int32) for each in ((0, 4, 4, 9), (0, 5, 6, 11))]
    found, lse = varlen.varlen_attn(*inputs, *ends, 5, 5, window_size=window, return_aux=varlen.AuxRequest(lse=True))
    left, right = (None if edge < 0 else edge for edge in window)
    given = {"max_seqlen_q": 5, "max_seqlen_k": 5, "window": (left, right), "return_lse": True}
    expected, sums = reference.attention_varlen(*inputs, *ends, **given)
    torch.testing.assert_close(lse, sums)
    assert_same(found, expected, inputs)


def test_torchs_registry_activates_and_restores() -> None:
    register_flash_impl()
    assert "flashgen" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    key = ("_scaled_dot_product_flash_attention", "CUDA")
    activate_flash_attention_impl("flashgen")
    try:
        assert current_flash_attention_impl() == "flashgen"
        assert "flash_impl.py" in torch._C._dispatch_dump(f"aten::{key[0]}")
    finally:
        restore_flash_attention_impl()
    assert "flash_impl.py" not in torch._C._dispatch_dump(f"aten::{key[0]}")
