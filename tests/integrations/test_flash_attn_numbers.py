"""Numbers of FlashAttention's calls: columns of larger tensors, none at all, and what is refused before a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import flash_attn, flash_attn_interface
from flashgen.core.errors import WorkloadError
from flashgen.flash_attn.bert_padding import pad_input
from tests.integrations.flash_attn_calls import randn

pytestmark = pytest.mark.usefixtures("on_reference")

Q, ROWS, PAGES, PACKED = randn(2, 1, 4, 16), randn(2, 32, 2, 16), randn(8, 16, 2, 16), randn(10, 4, 16)
COS = randn(32, 8)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cached(module: Any, **given: Any) -> Callable[[], Any]:
    cache = PAGES if given.keys() & {"block_table", "page_table"} else ROWS
    return lambda: module.flash_attn_with_kvcache(Q, cache.clone(), cache.clone(), **given)


def columns(given: dict[str, Any]) -> dict[str, Any]:
    """The same numbers, no two side by side."""
    return {
        name: torch.stack([x, x], -1)[..., 0] if isinstance(x, torch.Tensor) and not x.is_floating_point() else x
        for name, x in given.items()
    }


L, TABLE = numbers(3, 5), torch.arange(8, dtype=torch.int32).view(2, 4)
NEW = {"k": randn(2, 1, 2, 16), "v": randn(2, 1, 2, 16), "rotary_cos": COS.cos(), "rotary_sin": COS.sin()}
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lengths": (flash_attn_interface, {"cache_seqlens": L}),
    "first keys": (flash_attn_interface, {"cache_seqlens": L, "cache_leftpad": numbers(1, 0)}),
    "rows": (flash_attn, {"cache_seqlens": L, "cache_batch_idx": numbers(1, 0)}),
    "pages": (flash_attn, {"cache_seqlens": L, "block_table": TABLE}),
    "pages of version 3": (flash_attn_interface, {"cache_seqlens": L, "page_table": TABLE}),
    "positions": (flash_attn_interface, {"cache_seqlens": L, "rotary_seqlens": numbers(2, 2), **NEW}),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_may_be_columns(name: str) -> None:
    module, given = CALLS[name]
    torch.testing.assert_close(cached(module, **columns(given))(), cached(module, **given)())


def test_packed_sequences_may_have_columns() -> None:
    ends, used = numbers(0, 4, 10), numbers(3, 5)
    for given in ({}, {"seqused_k": used}):
        called = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 6, "max_seqlen_k": 6, **given}
        expected = flash_attn_interface.flash_attn_varlen_func(PACKED, PACKED, PACKED, **called)
        found = flash_attn_interface.flash_attn_varlen_func(PACKED, PACKED, PACKED, **columns(called))
        torch.testing.assert_close(found, expected)


def test_nothing_to_attend_to_over_caches() -> None:
    attend = flash_attn_interface.flash_attn_with_kvcache
    none = ROWS[:, :0]
    named = {"cache_seqlens": numbers(), "cu_seqlens_q": numbers(0), "max_seqlen_q": 1}
    assert attend(PACKED[:0], ROWS, ROWS, **named).shape == (0, 4, 16)
    named = {"cache_seqlens": numbers(0, 0), "cu_seqlens_q": numbers(0, 4, 10), "max_seqlen_q": 6}
    out = attend(PACKED, none, none, **named)
    assert out.shape == PACKED.shape
    assert not out.any()
    assert attend(Q[:, :0], ROWS, ROWS, cache_seqlens=L).shape == (2, 0, 4, 16)


@pytest.mark.parametrize("wrong", [{"alibi_slopes": torch.ones(3)}, {"softcap": -1.0}, {"softmax_scale": -1.0}])
def test_a_call_that_is_refused_writes_nothing(wrong: dict[str, Any]) -> None:
    k_cache, v_cache = ROWS.clone(), ROWS.clone()
    with pytest.raises(WorkloadError, match=next(iter(wrong))):
        flash_attn.flash_attn_with_kvcache(Q, k_cache, v_cache, NEW["k"], NEW["v"], cache_seqlens=L, **wrong)
    assert torch.equal(k_cache, ROWS)
    assert torch.equal(v_cache, ROWS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (cached(flash_attn, cache_seqlens=[3, 5]), "cache_seqlens.* a whole number"),
        (cached(flash_attn, cache_seqlens=L, block_table=TABLE, cache_batch_idx=L.float()), "cache_batch_idx is"),
        (cached(flash_attn, cache_seqlens=L, block_table=TABLE, cache_batch_idx=L[None]), "cache_batch_idx is"),
        (cached(flash_attn, block_table=TABLE[0]), r"block_table is \(batch, pages\)"),
        (lambda: flash_attn_interface.flash_attn_combine(torch.ones(()), torch.ones(())), "lse_partial is"),
    ],
)
def test_numbers_of_another_kind_are_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        call()


def test_a_merged_output_goes_where_it_fits() -> None:
    states, lses = randn(2, 1, 3, 4, 16), randn(2, 1, 3, 4)
    merged, _ = flash_attn_interface.flash_attn_combine(states, lses)
    out = torch.empty_like(merged)
    assert flash_attn_interface.flash_attn_combine(states, lses, out=out)[0] is out
    torch.testing.assert_close(out, merged)
    for wrong, named in ((out[..., :1], {}), (out, {"out_dtype": torch.bfloat16})):
        with pytest.raises(WorkloadError, match="out is"):
            flash_attn_interface.flash_attn_combine(states, lses, out=wrong, **named)


def test_rows_are_padded_by_int32_indices() -> None:
    found = pad_input(PACKED[:3], numbers(0, 2, 3), 2, 2)
    assert torch.equal(found.flatten(0, 1)[[0, 2, 3]], PACKED[:3])
