"""What FlashAttention's functions refuse, and the words they do it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import flash_attn, flash_attn_interface
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.flash_attn.layers import rotary
from tests.integrations.flash_attn_calls import HK, SQ, B, D, H, assert_same, ends, randn

pytestmark = pytest.mark.usefixtures("on_reference")


@pytest.mark.parametrize("heads", [H + HK + 1, H, H - 1])
def test_heads_of_packed_tensors_that_do_not_divide_are_refused(heads: int) -> None:
    qkv, turn = randn(B, SQ, heads, D), randn(SQ, D // 2)
    with pytest.raises(WorkloadError, match=rf"2 \* nheads_k, head_dim\), got \(2, 5, {heads}, 16\) and num_heads_q 4"):
        flash_attn_interface.flash_attn_qkvpacked_func(qkv, num_heads_q=H)
    with pytest.raises(WorkloadError, match="num_heads_q 4"):
        rotary.apply_rotary_emb_qkv_(qkv, turn, turn, num_heads_q=H)


@pytest.mark.parametrize("queries", [3, 20])
def test_a_length_for_all_sequences_is_a_length(queries: int) -> None:
    q, cache = randn(B, queries, H, D), randn(B, 32, HK, D)
    for wrong, words in ((3.5, "must be a whole number, got 3.5"), (-1, "must be at least 0, got -1")):
        with pytest.raises(WorkloadError, match=f"cache_seqlens, where it is no tensor, {words}"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=wrong)  # type: ignore[arg-type]


def version_2(**given: Any) -> Any:
    x = randn(1, 4, 2, 16)
    return flash_attn.flash_attn_func(x, x, x, **given)


def packed_2(**given: Any) -> Any:
    x = randn(4, 2, 16)
    return flash_attn.flash_attn_varlen_func(x, x, x, ends((4,)), ends((4,)), 4, 4, **given)


def version_3(**given: Any) -> Any:
    x = randn(1, 4, 2, 16)
    return flash_attn_interface.flash_attn_func(x, x, x, **given)


def cached_3(**given: Any) -> Any:
    x = randn(1, 4, 2, 16)
    return flash_attn_interface.flash_attn_with_kvcache(x, x, x, **given)


ONE = torch.ones(1, 2)
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        packed_2,
        {"dropout_p": 0.1, "block_table": torch.zeros(1, 1).int()},
        "with a block_table does not support dropout",
    ),
    *[(version_3, {name: ONE}, name) for name in ("qv", "q_descale", "k_descale", "v_descale")],
    (version_3, {"attention_chunk": 64}, "attention_chunk, got 64"),
    (cached_3, {"qv": ONE}, "qv"),
]


@pytest.mark.parametrize(("call", "given", "words"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_not_supported_is_refused_by_name(call: Callable[..., Any], given: dict[str, Any], words: str) -> None:
    call()
    with pytest.raises(UnsupportedError, match=words):
        call(**given)


def test_arguments_that_do_not_belong_together_are_refused() -> None:
    x = randn(1, 4, 2, 16)
    for given, words in (
        ({"k": x}, "come together"),
        ({"rotary_cos": ONE, "rotary_sin": ONE}, "rotary embeddings are of new keys"),
        ({"k": x, "v": x}, "go behind cache_seqlens"),
        ({"window_size": 3}, "window_size is"),
    ):
        with pytest.raises(WorkloadError, match=words):
            flash_attn.flash_attn_with_kvcache(x, x.clone(), x.clone(), **given)
    many = randn(1, 20, 2, 16)
    odd = randn(700).as_strided((2, 3, 2, 16), (97, 32, 16, 1))  # rows at no multiple of a slot
    twice = torch.cat([many, many])
    with pytest.raises(UnsupportedError, match="more than 16 queries with a window"):
        flash_attn.flash_attn_with_kvcache(twice, odd, odd, window_size=(3, 3))
    assert flash_attn.flash_attn_with_kvcache(twice, odd, odd, causal=True, window_size=(3, 3)).shape == twice.shape
    pad, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    parts = {"cache_seqlens": lengths, "cache_leftpad": pad, "causal": True}
    found = [flash_attn.flash_attn_with_kvcache(twice, x, x, **parts) for x in (odd, odd.contiguous())]
    assert_same(*found)  # pieces, of which some see no key, and one call
    packed = {"cu_seqlens_q": ends((3, 17)), "cache_seqlens": torch.tensor([2, 3]).int()}
    with pytest.raises(UnsupportedError, match="packed queries over caches whose rows lie at multiples"):
        flash_attn_interface.flash_attn_with_kvcache(many[0], odd, odd, max_seqlen_q=17, **packed)
    with pytest.raises(WorkloadError, match="come with max_seqlen_q"):
        flash_attn_interface.flash_attn_with_kvcache(many[0], twice, twice, **packed)
    with pytest.raises(WorkloadError, match=r"qkv is \(\.\.\., 3, nheads"):
        flash_attn.flash_attn_qkvpacked_func(x)


def rows_apart() -> torch.Tensor:
    """A cache whose rows lie at no multiple of a slot."""
    return torch.zeros(700).as_strided((2, 3, 2, 16), (97, 32, 16, 1))


def test_what_is_refused_leaves_the_cache_as_it_is() -> None:
    """New keys are written by a call of their own, which is right where the one that attends is refused."""
    pages = torch.zeros(3, 5, 2, 16)[:, :4]  # slots that lie apart
    table, pad = torch.tensor([[0], [2]]).int(), torch.zeros(2).int()
    by_2, by_3 = flash_attn.flash_attn_with_kvcache, flash_attn_interface.flash_attn_with_kvcache
    packed = {"cu_seqlens_q": ends((3, 17)), "max_seqlen_q": 17}
    cases: list[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, dict[str, Any], str]] = [
        (by_2, torch.zeros(2, 1, 3, 16), torch.zeros(2, 3, 2, 16), {}, "a multiple of its 2 heads, got"),
        (by_2, torch.zeros(2, 1, 4, 8), torch.zeros(2, 3, 2, 16), {}, "with its head_dim, 16"),
        (by_2, torch.zeros(2, 1, 4, 16).half(), torch.zeros(2, 3, 2, 16), {}, "in the dtype of k_cache"),
        (by_2, torch.zeros(2, 20, 4, 16), rows_apart(), {"window_size": (3, 3)}, "more than 16 queries with a window"),
        (by_3, torch.zeros(20, 4, 16), rows_apart(), packed, "packed queries over caches whose rows lie at multiples"),
        (
            by_2,
            torch.zeros(2, 1, 4, 16),
            pages,
            {"block_table": table, "cache_leftpad": pad},
            "lie one behind the other",
        ),
    ]
    for function, q, cache, given, words in cases:
        elements = cache.untyped_storage().nbytes() // cache.element_size()
        others = torch.zeros(elements).as_strided(cache.shape, cache.stride())
        new = torch.ones(2, 1, 2, 16)
        with pytest.raises((WorkloadError, UnsupportedError), match=words):
            function(q, cache, others, new, new, cache_seqlens=torch.zeros(2).int(), **given)
        assert not cache.any()
        assert not others.any()


def test_batches_beside_packed_sequences_are_of_one_shape() -> None:
    q, k = randn(6, H, D), randn(2, 3, HK, D)
    packed, places = flash_attn_interface.flash_attn_varlen_func, ends((2, 4))
    for keys, words in (
        ((k, k.view(3, 2, HK, D)), r"k and v are \(batch, .* got \(2, 3, 2, 16\) and \(3, 2, 2, 16\)"),
        ((k[0], k[0]), r"without cu_seqlens_k, k and v are \(batch, .* got \(3, 2, 16\) and \(3, 2, 16\)"),
        ((k[:1], k[:1]), "cu_seqlens_k is int32"),
    ):
        with pytest.raises(WorkloadError, match=words):
            packed(q, *keys, places, None, 4, None)
    with pytest.raises(WorkloadError, match=r"without cu_seqlens_q, q is \(batch, .* got \(6, 4, 16\)"):
        packed(q, k, k, None, None, None, None)
    with pytest.raises(WorkloadError, match="cu_seqlens_k"):
        flash_attn.flash_attn_varlen_func(q, k, k, places, None, 4, 3)  # type: ignore[arg-type]
