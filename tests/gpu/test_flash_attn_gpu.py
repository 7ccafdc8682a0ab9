"""FlashAttention's functions by kernels, against the same calls on the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flashgen
from flashgen import flash_attn, flash_attn_interface, reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


@contextmanager
def on_reference() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in reference.__all__:
            patch.setattr(flashgen, name, getattr(reference, name))
        yield


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def assert_same(call: Callable[..., Any], *leaves: Tensor, **given: Any) -> None:
    """Output, LSE and gradients of a call are those of the references in float64."""
    found = []
    for exact in (False, True):
        own = [leaf.detach().to(torch.float64 if exact else leaf.dtype).requires_grad_() for leaf in leaves]
        if exact:
            with on_reference():
                out, lse = call(*own, return_attn_probs=True, **given)[:2]
        else:
            out, lse = call(*own, return_attn_probs=True, **given)[:2]
        grads = torch.autograd.grad((out * randn(*out.shape, seed=9).to(out.dtype)).sum(), own)
        found.append([x.double() for x in (out, lse, *grads)])
    torch.testing.assert_close(*found, **TOLERANCE)


SCORES = [{"causal": True}, {"window_size": (40, 0), "softcap": 20.0}, {"causal": True, "deterministic": True}]


@pytest.mark.parametrize("given", SCORES, ids=str)
def test_dense(given: dict[str, Any]) -> None:
    q, k, v = randn(2, 130, 4, 64), randn(2, 200, 2, 64), randn(2, 200, 2, 64, seed=1)
    assert_same(flash_attn.flash_attn_func, q, k, v, **given)
    assert_same(flash_attn_interface.flash_attn_func, q, k, v, **given)
    assert_same(flash_attn.flash_attn_qkvpacked_func, randn(2, 100, 3, 4, 64), **given)
    assert_same(flash_attn.flash_attn_kvpacked_func, q, torch.stack([k, v], 2), **given)


@pytest.mark.parametrize("given", SCORES, ids=str)
def test_packed_sequences(given: dict[str, Any]) -> None:
    q, k, v = randn(150, 4, 64), randn(210, 2, 64), randn(210, 2, 64, seed=1)
    places = {"cu_seqlens_q": ends(100, 0, 50), "cu_seqlens_k": ends(120, 20, 70)}
    longest = {"max_seqlen_q": 100, "max_seqlen_k": 120}
    assert_same(flash_attn.flash_attn_varlen_func, q, k, v, **places, **longest, **given)
    assert_same(flash_attn_interface.flash_attn_varlen_func, q, k, v, **places, **longest, **given)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_caches(is_paged: bool, queries: int) -> None:
    table = torch.arange(24, dtype=torch.int32, device="cuda").flip(0).view(2, 12) if is_paged else None
    shape = (24, 16, 2, 128) if is_paged else (2, 192, 2, 128)
    q, k, v = randn(2, queries, 8, 128), randn(2, queries, 2, 128), randn(2, queries, 2, 128, seed=1)
    angle = torch.rand(192, 32, generator=torch.Generator().manual_seed(0)).to("cuda") * 6.3
    given: dict[str, Any] = {
        "rotary_cos": angle.cos().bfloat16(),
        "rotary_sin": angle.sin().bfloat16(),
        "rotary_interleaved": False,
        "causal": True,
        "block_table": table,
        "return_softmax_lse": True,
    }
    lengths, found = torch.tensor([100, 0], dtype=torch.int32, device="cuda"), []
    for exact in (False, True):
        caches = randn(*shape, seed=2), randn(*shape, seed=3)
        if exact:
            with on_reference():
                both = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, **given)
        else:
            both = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, **given)
        found.append([x.double() for x in (*both, *caches)])
    torch.testing.assert_close(*found, **TOLERANCE)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_new_keys(is_paged: bool, causal: bool) -> None:
    """And packed queries, rotated, also in a graph that is replayed with other lengths."""
    table = torch.arange(36, dtype=torch.int32, device="cuda").flip(0).view(3, 12) if is_paged else None
    shape = (36, 16, 2, 128) if is_paged else (3, 192, 2, 128)
    q, k, v = randn(25, 8, 128), randn(24, 2, 128), randn(24, 2, 128, seed=1)
    angle = torch.rand(192, 32, generator=torch.Generator().manual_seed(0)).to("cuda") * 6.3
    lengths, new = torch.tensor([100, 0, 7], dtype=torch.int32, device="cuda"), ends(4, 0, 18)
    given: dict[str, Any] = {
        "rotary_cos": angle.cos().bfloat16(),
        "rotary_sin": angle.sin().bfloat16(),
        "causal": causal,
        "page_table": table,
        "cache_seqlens": lengths,
        "cu_seqlens_q": ends(5, 1, 19),
        "cu_seqlens_k_new": new,
        "max_seqlen_q": 19,
        "return_softmax_lse": True,
    }
    caches = randn(*shape, seed=2), randn(*shape, seed=3)

    def found(*, exact: bool = False) -> list[Tensor]:
        own = [cache.clone() for cache in caches]
        if exact:
            with on_reference():
                both = flash_attn_interface.flash_attn_with_kvcache(q, *own, k, v, **given)
        else:
            both = flash_attn_interface.flash_attn_with_kvcache(q, *own, k, v, **given)
        return [*both, *own]

    def assert_like_the_reference(results: list[Tensor]) -> None:
        torch.testing.assert_close([x.double() for x in results], [x.double() for x in found(exact=True)], **TOLERANCE)

    assert_like_the_reference(found())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = found()
    for now, counts in (([3, 150, 60], (0, 20, 4)), ([0, 1, 170], (1, 3, 19))):
        lengths.copy_(torch.tensor(now))
        new.copy_(ends(*counts))
        graph.replay()
        assert_like_the_reference(captured)


KINDS = ["rows", "heads first", "halves", "pages", "batch_idx", "leftpad", "batch_idx and leftpad"]


@pytest.mark.parametrize("kind", KINDS)
def test_long_chunks_are_one_call_over_any_cache(kind: str) -> None:
    """Only visible keys are used: all others are NaN. Against each sequence in float64."""
    lengths, slots, chunk = (200, 300), 384, 40
    first = (190, 37) if "leftpad" in kind else (0, 0)
    shape = {"heads first": (2, 3, 2, slots, 64), "halves": (3, 2, slots, 2, 64)}.get(kind, (2, 3, slots, 2, 64))
    k, v = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda").unbind(1 if kind == "halves" else 0)
    k, v = (x.transpose(1, 2) if kind == "heads first" else x for x in (k, v))
    row = (2, 0) if "batch_idx" in kind else (0, 1)
    for b, i, n in zip(row, first, lengths, strict=True):
        k[b, i:n], v[b, i:n] = torch.randn(2, n - i, 2, 64, device="cuda").bfloat16()
    given = {"cache_batch_idx": torch.tensor(row, dtype=torch.int32, device="cuda")} if "batch_idx" in kind else {}
    if "leftpad" in kind:
        given["cache_leftpad"] = torch.tensor(first, dtype=torch.int32, device="cuda")
    caches = k, v
    if kind == "pages":
        caches = k.reshape(-1, 16, 2, 64), v.reshape(-1, 16, 2, 64)
        given = {"block_table": torch.arange(48, dtype=torch.int32, device="cuda").view(2, 24)}
    q = torch.randn(2, chunk, 8, 64, device="cuda").bfloat16()
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for scores in ({"causal": True}, {"window_size": (30, 4)}):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=used, return_softmax_lse=True, **scores, **given
        )
        for b, n in enumerate(lengths):
            one, keys, values = (x.double() for x in (q[b], k[row[b], first[b] : n], v[row[b], first[b] : n]))
            window = scores.get("window_size", (None, 0))
            expected = flashgen.reference.attention(
                one[None], keys[None], values[None], layout="bshd", window=window, return_lse=True
            )
            torch.testing.assert_close(out[b].double(), expected[0][0], atol=2e-2, rtol=2e-2)
            blind = expected[1][0].masked_fill(expected[1][0] == -torch.inf, torch.inf)
            torch.testing.assert_close(lse[b].double(), blind, atol=2e-3, rtol=2e-3)
