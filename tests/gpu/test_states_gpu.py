"""`append_kv` and `merge_states` at the sizes of models: against torch, in graphs, compiled, without a sync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashgen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

HEADS, HEADS_K, DIM = 32, 8, 128
BF16 = torch.bfloat16


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def angles(positions: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rates = 10000.0 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
    angle = torch.arange(positions, device="cuda")[:, None] * rates
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """(batch, seqlen, nheads, head_dim) in float64 at positions (batch, seqlen)."""
    half, x = cos.shape[1], x.double()
    c, s = (table.double()[positions.long()][:, :, None] for table in (cos, sin))
    one, two = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    )
    turned = (one * c - two * s, one * s + two * c)
    front = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([front, x[..., 2 * half :]], -1)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=2 * eps)


def cache_of(layout: str, blocks: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V, and the memory of both, which is NaN."""
    nan = float("nan")
    if layout == "halves":
        whole = torch.full((blocks, 2, page, HEADS_K, DIM), nan, dtype=BF16, device="cuda")
        return whole[:, 0], whole[:, 1], whole
    if layout == "hnd":
        whole = torch.full((2, blocks, HEADS_K, page, DIM), nan, dtype=BF16, device="cuda").transpose(2, 3)
        return whole[0], whole[1], whole
    whole = torch.full((blocks, HEADS_K, page, 2 * DIM), nan, dtype=BF16, device="cuda").transpose(1, 2)
    return whole[..., :DIM], whole[..., DIM:], whole


@pytest.mark.parametrize("q_causal", [True, False])
@pytest.mark.parametrize(("layout", "page", "new"), [("halves", 16, 1), ("hnd", 64, 7), ("interleaved", 1, 33)])
@pytest.mark.parametrize(("interleaved", "rotary_dim", "table"), [(False, 128, BF16), (True, 64, torch.float32)])
def test_a_batch_of_ragged_sequences(
    layout: str,
    page: int,
    new: int,
    interleaved: bool,
    rotary_dim: int,
    table: torch.dtype,
    q_causal: bool,
    no_sync: None,
) -> None:
    torch.cuda.set_sync_debug_mode("default")
    batch, capacity = 65, 512
    pages = capacity // page
    k_cache, v_cache, _ = cache_of(layout, batch * pages, page)
    order = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
    lengths = torch.randint(0, capacity - new, (batch,), device="cuda", dtype=torch.int32)
    lengths[:4] = int32([0, page - 1, page, capacity - new])
    positions = lengths[:, None] + torch.arange(new, device="cuda")
    entries = torch.zeros_like(order, dtype=torch.bool).scatter_(1, (positions // page), True)
    block_table = order.masked_fill(~entries, -1)
    block_table[::2] = order[::2].masked_fill(~entries[::2], 2**31 - 1)
    k, v, q = (
        randn(batch, new, HEADS_K, DIM),
        randn(batch, new, HEADS_K, DIM, seed=1),
        randn(batch, new, HEADS, DIM, seed=2),
    )
    cos, sin = angles(capacity, rotary_dim, table)
    rotary: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    flashgen.append_kv(k[:0], v[:0], k_cache, v_cache, lengths[:0], block_table=block_table[:0])
    torch.cuda.set_sync_debug_mode("error")
    found = flashgen.append_kv(
        k, v, k_cache, v_cache, lengths, block_table=block_table, **rotary, q=q, q_causal=q_causal
    )
    torch.cuda.set_sync_debug_mode("default")
    blocks, slots = order.gather(1, positions // page).long(), (positions % page).long()
    near(k_cache[blocks, slots], rotated(k, positions, cos, sin, interleaved=interleaved))
    assert torch.equal(v_cache[blocks, slots], v)
    near(
        found,
        rotated(q, positions if q_causal else lengths[:, None].expand(-1, new), cos, sin, interleaved=interleaved),
    )
    for cache in (k_cache, v_cache):
        assert int(cache.isnan().sum()) == cache.numel() - k.numel()


def test_rows_slots_and_numbers() -> None:
    k, v = randn(5, 3, HEADS_K, DIM), randn(5, 3, HEADS_K, DIM, seed=1)
    k_cache, v_cache, _ = cache_of("halves", 9, 64)
    rows = int32([8, 0, 3, 1, 7])
    flashgen.append_kv(k, v, k_cache, v_cache, 11, batch_idx=rows, leftpad=int32([0, 1, 2, 3, 4]))
    assert torch.equal(k_cache[rows.long(), 11:14], k)
    assert torch.equal(v_cache[rows.long(), 11:14], v)
    assert int(k_cache.isnan().sum()) == k_cache.numel() - k.numel()
    k_cache, v_cache, _ = cache_of("hnd", 9, 64)
    slots = torch.randperm(9 * 64, device="cuda")[:15]
    slots[4] = -1
    flashgen.append_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slot_mapping=slots)
    kept = slots >= 0
    assert torch.equal(k_cache[slots[kept] // 64, slots[kept] % 64], k.flatten(0, 1)[kept])
    assert torch.equal(v_cache[slots[kept] // 64, slots[kept] % 64], v.flatten(0, 1)[kept])
    assert int(v_cache.isnan().sum()) == v_cache.numel() - 14 * HEADS_K * DIM


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    page, blocks = 16, 140_000
    whole = torch.zeros(blocks, 2, page, HEADS_K, DIM, dtype=BF16, device="cuda")
    assert whole.numel() > 2**32
    k, v = randn(4, 2, HEADS_K, DIM), randn(4, 2, HEADS_K, DIM, seed=1)
    chosen = [blocks - 1, 70_001, 131_073, 0]
    table = int32(chosen)[:, None].contiguous()
    flashgen.append_kv(k, v, whole[:, 0], whole[:, 1], int32([14, 0, 3, 5]), block_table=table)
    for b, (block, slot) in enumerate(zip(chosen, [14, 0, 3, 5], strict=True)):
        assert torch.equal(whole[block, 0, slot : slot + 2], k[b])
        assert torch.equal(whole[block, 1, slot : slot + 2], v[b])
    counts = [
        int(part.count_nonzero()) for part in whole.split(10_000)
    ]  # at once it takes memory of 8 bytes an element
    assert sum(counts) == int(k.count_nonzero() + v.count_nonzero())


def test_one_graph_serves_all_lengths(no_sync: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    batch, page, pages = 17, 16, 32
    k, v, q = randn(batch, 1, HEADS_K, DIM), randn(batch, 1, HEADS_K, DIM, seed=1), randn(batch, 1, HEADS, DIM, seed=2)
    cos, sin = angles(page * pages, DIM, BF16)
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
    outs, lses = randn(3, batch, HEADS, 1, DIM, seed=3), randn(3, batch, HEADS, 1, dtype=torch.float32, seed=4)
    caches = [cache_of("halves", batch * pages, page) for _ in range(2)]

    def step(cache: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        options = {"block_table": table, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "q": q}
        turned = flashgen.append_kv(k, v, cache[0], cache[1], lengths, **options)
        return turned, *flashgen.merge_states(outs, lses), *flashgen.merge_states(list(outs), list(lses))

    step(cache_of("halves", batch * pages, page))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(caches[0])
    for draw in range(50):
        lengths.random_(0, page * pages, generator=torch.Generator("cuda").manual_seed(draw))
        lengths[draw % batch] = (0, page * pages, page * pages - 1)[draw % 3]
        k.normal_()
        lses.normal_()
        lses[draw % 3, : draw % batch] = -float("inf")
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        expected = step(caches[1])
        torch.cuda.set_sync_debug_mode("default")
        for one, other in zip(captured, expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(caches[0][2].view(torch.int16), caches[1][2].view(torch.int16))


def test_one_graph_decodes_step_after_step() -> None:
    """Append, attend over the cache, count on: what an engine captures once and replays for each token."""
    first, steps, page, pages = [0, 15, 100], 20, 16, 8
    batch, cos, sin = len(first), *angles(page * pages, DIM)
    table = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
    k_cache, v_cache, whole = cache_of("halves", batch * pages, page)
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    k, v, q = (torch.empty(batch, 1, heads, DIM, dtype=BF16, device="cuda") for heads in (HEADS_K, HEADS_K, HEADS))

    def step() -> torch.Tensor:
        options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "q": q}
        turned = flashgen.append_kv(k, v, k_cache, v_cache, lengths, block_table=table, **options)
        lengths.add_(1)
        return flashgen.attention_decode(turned, k_cache, v_cache, lengths, block_table=table, causal=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    whole.fill_(float("nan"))
    for b, length in enumerate(first):  # what was there before: a prompt
        at = torch.arange(length, device="cuda")
        places = table[b].long()[at // page], at % page
        k_cache[places], v_cache[places] = randn(length, HEADS_K, DIM), randn(length, HEADS_K, DIM, seed=1)
    lengths.copy_(int32(first))
    for number in range(steps):
        for seed, tensor in enumerate((k, v, q)):
            tensor.copy_(randn(*tensor.shape, seed=3 * number + seed))
        graph.replay()
        turned = rotated(q, lengths[:, None] - 1, cos, sin, interleaved=False)
        for b, length in enumerate(first):
            at = torch.arange(length + number + 1, device="cuda")
            keys, values = (
                cache[table[b].long()[at // page], at % page].double().repeat_interleave(HEADS // HEADS_K, 1)
                for cache in (k_cache, v_cache)
            )
            weights = (torch.einsum("hd,khd->hk", turned[b, 0], keys) / DIM**0.5).softmax(-1)
            expected = torch.einsum("hk,khd->hd", weights, values)
            torch.testing.assert_close(out[b, 0].double(), expected, rtol=2e-2, atol=2e-2)
    assert lengths.tolist() == [length + steps for length in first]


def test_compiled_functions_write_in_order() -> None:
    batch, page, pages = 4, 16, 8
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)

    def step(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flashgen.append_kv(k * 2, v, cache[:, 0], cache[:, 1], lengths, block_table=table)
        between = cache.float().sum()
        outs = k.transpose(1, 2)
        out, lse = flashgen.merge_states([outs, outs * 2], [outs[..., 0].float(), outs[..., 1].float()])
        flashgen.append_kv(k * 3, v, cache[:, 0], cache[:, 1], lengths + 1, block_table=table)
        return between, out, lse

    caches = [torch.zeros(batch * pages, 2, page, HEADS_K, DIM, dtype=BF16, device="cuda") for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True)
    for length in (3, 90):
        given = randn(batch, 5, HEADS_K, DIM), randn(batch, 5, HEADS_K, DIM, seed=1)
        lengths = int32([length, 0, 15, 16])
        expected, found = step(*given, caches[0], lengths), compiled(*given, caches[1], lengths)
        assert torch.equal(caches[0], caches[1])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "batch", "rows"), [(2, 64, 1), (3, 2, 1000), (40, 1, 1), (4, 3, 129)])
def test_states_of_any_number(count: int, batch: int, rows: int, dtype: torch.dtype) -> None:
    outs = randn(count, batch, HEADS, rows, DIM, dtype=dtype)
    lses = 20 * randn(count, batch, HEADS, rows, dtype=torch.float32, seed=1)
    empty = randn(count, batch, HEADS, rows, dtype=torch.float32, seed=2) < -1
    empty[:, 0, 0] = True
    outs, lses = outs.masked_fill(empty[..., None], float("nan")), lses.masked_fill(empty, -float("inf"))
    expected_lse = lses.double().logsumexp(0)
    weights = (lses.double() - expected_lse).exp().nan_to_num(0.0)
    expected = (weights[..., None] * outs.double().nan_to_num(0.0)).sum(0)
    bshd = outs.transpose(2, 3).contiguous()
    results = [
        flashgen.merge_states(outs, lses),
        flashgen.merge_states(list(outs), list(lses)),
        flashgen.merge_states(bshd, lses.transpose(2, 3).contiguous().transpose(2, 3), layout="bshd"),
    ]
    for number, (out, lse) in enumerate(results):
        near(out.transpose(1, 2) if number == 2 else out, expected)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=2e-6)
        assert torch.equal(lse, results[0][1])
    assert results[0][0][0, 0].eq(0).all()


def test_attention_over_chunks_is_attention_over_all_keys() -> None:
    q, k, v = randn(2, HEADS, 7, DIM), randn(2, HEADS_K, 3000, DIM, seed=1), randn(2, HEADS_K, 3000, DIM, seed=2)
    parts = [
        flashgen.attention(q, k[:, :, first:end], v[:, :, first:end], return_lse=True)
        for first, end in ((0, 1024), (1024, 1500), (1500, 3000))
    ]
    out, lse = flashgen.merge_states([part[0] for part in parts], [part[1] for part in parts])
    whole, whole_lse = flashgen.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-4)


def test_states_have_a_gradient() -> None:
    outs = randn(3, 2, 4, 65, 64, dtype=torch.float32).requires_grad_()
    lses = randn(3, 2, 4, 65, dtype=torch.float32, seed=1).requires_grad_()
    wide = [one.detach().double().requires_grad_() for one in (outs, lses)]
    out, lse = flashgen.merge_states(outs, lses)
    expected = (wide[1].softmax(0)[..., None] * wide[0]).sum(0), wide[1].logsumexp(0)
    ((out.sin()).sum() + lse.cos().sum()).backward()
    (expected[0].sin().sum() + expected[1].cos().sum()).backward()
    for one, other in zip((outs, lses), wide, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
