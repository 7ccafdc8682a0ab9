"""ATen's flash operators by flashgen, reached by torch's dispatcher and its autograd, for tensors on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    varlen,
)

import flashgen
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
    with pytest.raises(UnsupportedError, match="does not support return_debug_mask"):
        aten._scaled_dot_product_flash_attention(*inputs, 0.5, False, True)


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("is_packed", [False, True])
def test_dropout_is_that_of_the_state_that_torch_keeps(is_packed: bool) -> None:
    """Forward and backward: the weights that are dropped are drawn by torch's generator, as `torch.randint` draws."""
    torch.manual_seed(5)
    drawn = torch.randint(2**63 - 1, (2,))
    torch.manual_seed(5)
    if is_packed:
        inputs, ends = leaves((9, 4, 8), (9, 2, 8), (9, 2, 8)), torch.tensor([0, 4, 9], dtype=torch.int32)
        found, _, state, _, _ = aten._flash_attention_forward(*inputs, ends, ends, 5, 5, 0.3, True, False)
        given = {"max_seqlen_q": 5, "max_seqlen_k": 5}
        expected = reference.attention_varlen(*inputs, ends, causal=True, dropout_p=0.3, rng_state=drawn, **given)
    else:
        inputs = leaves((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
        found, *_, state, _, _ = aten._scaled_dot_product_flash_attention(*inputs, 0.3, True)
        expected = reference.attention(*inputs, causal=True, dropout_p=0.3, rng_state=drawn)
    assert torch.equal(state.view(torch.int64), drawn)
    assert_same(found, expected, inputs)


@pytest.mark.usefixtures("overridden")
def test_varlen_attn_over_pages() -> None:
    q, k, v = (x.detach() for x in leaves((9, 4, 8), (5, 4, 2, 8), (5, 4, 2, 8)))
    ends, used = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([6, 8], dtype=torch.int32)
    table = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    given = {"seqused_k": used, "block_table": table}
    found = varlen.varlen_attn(q, k, v, ends, None, 5, 8, window_size=(-1, 0), enable_gqa=True, **given)
    expected = reference.attention_varlen(q, k, v, ends, max_seqlen_q=5, max_seqlen_k=8, causal=True, **given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


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


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize(("num_splits", "is_invariant"), [(1, True), (None, False)])
def test_one_split_asks_for_the_same_bits_in_every_batch(
    num_splits: int | None, is_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    attend: Any = flashgen.attention_varlen

    def spy(*given: Any, deterministic: bool = False, **named: Any) -> Any:
        asked.append(deterministic)
        return attend(*given, deterministic=deterministic, **named)

    monkeypatch.setattr(flashgen, "attention_varlen", spy)
    inputs, ends = leaves((9, 4, 8), (9, 4, 8), (9, 4, 8)), torch.tensor([0, 4, 9], dtype=torch.int32)
    varlen.varlen_attn(*(x.detach() for x in inputs), ends, ends, 5, 5, num_splits=num_splits)
    assert asked == [is_invariant]


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
