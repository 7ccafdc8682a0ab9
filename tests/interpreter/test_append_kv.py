"""New keys and values in caches of every kind, against a loop in float64; not one byte beside their slots changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashgen
from flashgen import reference
from tests.rotary import rotated

BATCH, NEW, HEADS, DIM, CAPACITY = 3, 3, 2, 24, 80
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAN = float("nan")


@pytest.fixture(autouse=True, params=["kernel", "reference"])
def append_kv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, interpreted, and its definition in torch."""
    if request.param == "reference":
        monkeypatch.setattr(flashgen, "append_kv", reference.append_kv)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(kw_only=True)
class Cache:
    """K and V of a cache, all NaN at first, and the memory that they are views of."""

    k: torch.Tensor
    v: torch.Tensor
    memory: list[torch.Tensor]

    @classmethod
    def made(cls, layout: str, blocks: int, page: int, dims: tuple[int, int], dtype: torch.dtype) -> Cache:
        """nhd, hnd, the two halves of each block, K and V side by side in each slot, or in rows of odd strides."""
        (d, dv), heads = dims, HEADS
        if layout == "halves":
            whole = torch.full((blocks, 2, page, heads, d), NAN, dtype=dtype)
            return cls(k=whole[:, 0], v=whole[:, 1], memory=[whole])
        if layout == "interleaved":
            whole = torch.full((blocks, heads, page, d + dv), NAN, dtype=dtype).transpose(1, 2)
            return cls(k=whole[..., :d], v=whole[..., d:], memory=[whole])
        shapes = [(blocks, heads, page, n) if layout == "hnd" else (blocks, page, heads, n) for n in dims]
        wholes = [torch.full((*shape[:3], shape[3] + (layout == "odd")), NAN, dtype=dtype) for shape in shapes]
        k, v = (whole[..., :n].transpose(1, 2 if layout == "hnd" else 1) for whole, n in zip(wholes, dims, strict=True))
        return cls(k=k, v=v, memory=wholes)

    def copy(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k.clone(), self.v.clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def angles(dim: int, dtype: torch.dtype, positions: int = CAPACITY) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(positions, dim // 2, generator=torch.Generator().manual_seed(7)) * 6.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def expect(
    cache: Cache,
    before: tuple[torch.Tensor, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    places: dict[tuple[int, int], tuple[int, int]],
    tolerance: float,
) -> None:
    """Tokens (b, i) lie at (block, slot), values bit for bit, keys within a rounding; the rest is as it was."""
    (k_before, v_before), written = before, torch.zeros(cache.k.shape[:2], dtype=torch.bool)
    for (b, i), (block, slot) in places.items():
        written[block, slot] = True
        torch.testing.assert_close(cache.k[block, slot].double(), k[b, i].double(), rtol=tolerance, atol=tolerance)
        assert torch.equal(bits(cache.v[block, slot]), bits(v[b, i]))
    assert torch.equal(bits(cache.k)[~written], bits(k_before)[~written])
    assert torch.equal(bits(cache.v)[~written], bits(v_before)[~written])


ROTARY = {"none": {}, "gptj": {"rotary_interleaved": True}, "neox": {"rotary_interleaved": False}}
PAGED = [  # page, layout, dtype, rotary, rotary_dim, head_dim, head_dim_v
    (1, "nhd", "bf16", "none", 0, 24, 24),
    (16, "halves", "fp16", "neox", 16, 24, 24),
    (64, "hnd", "fp32", "gptj", 48, 64, 40),
    (16, "interleaved", "bf16", "gptj", 32, 32, 16),
    (5, "odd", "fp32", "neox", 64, 72, 8),
]


@pytest.mark.parametrize(("page", "layout", "kind", "rotary", "rotary_dim", "dim", "dim_v"), PAGED)
def test_pages_of_every_layout(
    page: int, layout: str, kind: str, rotary: str, rotary_dim: int, dim: int, dim_v: int
) -> None:
    dtype, pages = DTYPES[kind], -(-CAPACITY // page)
    cache = Cache.made(layout, BATCH * pages + 2, page, (dim, dim_v), dtype)
    before = cache.copy()
    order = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(BATCH, pages).int()
    lengths = [0, page - 1, min(page, CAPACITY - NEW)]
    for b, length in enumerate(lengths):  # entries that no token needs: of pages before, and behind
        for entry in range(pages):
            if not length // page <= entry <= (length + NEW - 1) // page:
                table[b, entry] = (-1, 2**31 - 1)[entry % 2]
    k, v = randn(BATCH, NEW, HEADS, dim, dtype=dtype), randn(BATCH, NEW, HEADS, dim_v, dtype=dtype, seed=1)
    given: dict[str, Any] = {"block_table": table, **ROTARY[rotary]}
    expected = k.double()
    if rotary != "none":
        given["rotary_cos"], given["rotary_sin"] = cos, sin = angles(rotary_dim, dtype, pages * page)
        turned = [
            rotated(k[b, i], cos, sin, lengths[b] + i, interleaved=rotary == "gptj")
            for b in range(BATCH)
            for i in range(NEW)
        ]
        expected = torch.stack(turned).view_as(expected)
    assert flashgen.append_kv(k, v, cache.k, cache.v, torch.tensor(lengths, dtype=torch.int32), **given) is None
    positions = {(b, i): lengths[b] + i for b in range(BATCH) for i in range(NEW)}
    places = {(b, i): (int(table[b, at // page]), at % page) for (b, i), at in positions.items()}
    expect(cache, before, expected, v, places, 2 * torch.finfo(dtype).eps if rotary != "none" else 0.0)


@pytest.mark.parametrize("as_number", [False, True])
def test_rows_of_a_cache_without_pages(as_number: bool) -> None:
    cache = Cache.made("nhd", 5, 8, (DIM, DIM), torch.bfloat16)
    before = cache.copy()
    k, v = (randn(BATCH, NEW, HEADS, DIM, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    lengths = [2, 2, 2] if as_number else [0, 5, 3]
    seqlens: Any = 2 if as_number else torch.tensor(lengths, dtype=torch.int32)
    leftpad = torch.tensor([0, 1, 3], dtype=torch.int32)  # moves nothing, as in FlashAttention
    # transposed new keys: strides of their own
    flashgen.append_kv(
        k.transpose(1, 2).contiguous().transpose(1, 2), v, cache.k, cache.v, seqlens, batch_idx=rows, leftpad=leftpad
    )
    places = {(b, i): (int(rows[b]), lengths[b] + i) for b in range(BATCH) for i in range(NEW)}
    expect(cache, before, k, v, places, 0.0)


def test_tokens_without_a_place_are_left_out() -> None:
    k, v = (randn(4, NEW, HEADS, DIM, seed=seed) for seed in (0, 1))
    lengths = torch.tensor([6, -1, 2**31 - 1, 0], dtype=torch.int32)
    cache = Cache.made("nhd", 4, 8, (DIM, DIM), torch.float32)
    before = cache.copy()
    flashgen.append_kv(k, v, cache.k, cache.v, lengths)
    whole = {(0, 0): (0, 6), (0, 1): (0, 7)} | {(3, i): (3, i) for i in range(NEW)}
    expect(cache, before, k, v, whole, 0.0)
    cache = Cache.made("nhd", 4, 4, (DIM, DIM), torch.float32)
    before = cache.copy()
    table = torch.tensor([[0, 1], [0, 1], [0, 1], [4, 3]], dtype=torch.int32)  # there is no block 4
    flashgen.append_kv(k, v, cache.k, cache.v, lengths, block_table=table)
    expect(cache, before, k, v, {(0, 0): (1, 2), (0, 1): (1, 3)}, 0.0)
    cache = Cache.made("nhd", 4, 8, (DIM, DIM), torch.float32)
    before = cache.copy()
    flashgen.append_kv(k, v, cache.k, cache.v, 0, batch_idx=torch.tensor([-1, 1, 4, 3], dtype=torch.int32))
    expect(cache, before, k, v, {(b, i): (b, i) for b in (1, 3) for i in range(NEW)}, 0.0)


@pytest.mark.parametrize("shape", ["packed", "padded", "batch", "flat"])
def test_slots(shape: str) -> None:
    cache = Cache.made("halves", 4, 16, (DIM, DIM), torch.float16)
    before = cache.copy()
    k, v = (randn(2, NEW, HEADS, DIM, dtype=torch.float16, seed=seed) for seed in (0, 1))
    slots = torch.tensor([[63, -1, 17], [0, 64, -(2**40)]])
    places = {(0, 0): (3, 15), (0, 2): (1, 1), (1, 0): (0, 0)}
    given_k, given_v, mapping = k, v, slots.flatten()
    if shape in ("packed", "padded"):
        given_k, given_v = k.flatten(0, 1), v.flatten(0, 1)
    if shape == "padded":
        mapping, places = slots[0].clone(), {(0, 0): (3, 15), (0, 2): (1, 1)}
    flashgen.append_kv(given_k, given_v, cache.k, cache.v, slot_mapping=slots if shape == "batch" else mapping)
    expect(cache, before, k, v, places, 0.0)


@pytest.mark.parametrize("q_causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_queries_are_rotated_beside_keys(q_causal: bool, interleaved: bool) -> None:
    heads_q, rows_q = 2 * HEADS, NEW + 2
    cache = Cache.made("nhd", BATCH, CAPACITY, (DIM, DIM), torch.float32)
    k, v = (randn(BATCH, NEW, HEADS, DIM, seed=seed) for seed in (0, 1))
    q = randn(BATCH, rows_q, heads_q, DIM, seed=2)
    given = q.clone()
    cos, sin = angles(16, torch.float32)
    lengths, positions = (
        [0, 9, 40],
        torch.tensor([0, 4, CAPACITY - 2], dtype=torch.int32),
    )  # the last runs past the table
    found = flashgen.append_kv(
        k,
        v,
        cache.k,
        cache.v,
        torch.tensor(lengths, dtype=torch.int32),
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        rotary_seqlens=positions,
        q=given,
        q_causal=q_causal,
    )
    assert torch.equal(given, q)
    assert found.shape == q.shape
    for b, first in enumerate(positions.tolist()):
        for i in range(rows_q):
            at = min(first + (i if q_causal else 0), CAPACITY - 1)
            expected = rotated(q[b, i], cos, sin, at, interleaved=interleaved)
            torch.testing.assert_close(found[b, i].double(), expected, rtol=1e-6, atol=1e-6)
        for i in range(NEW):
            expected = rotated(k[b, i], cos, sin, min(first + i, CAPACITY - 1), interleaved=interleaved)
            torch.testing.assert_close(cache.k[b, lengths[b] + i].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_packed_tokens_have_a_slot_and_a_position_each(interleaved: bool) -> None:
    """As sequences of one token; packed queries likewise, in a call without a token."""
    cache = Cache.made("hnd", 3, 8, (DIM, DIM), torch.float32)
    before = cache.copy()
    k, v = (randn(4, 1, HEADS, DIM, seed=seed) for seed in (0, 1))
    cos, sin = angles(16, torch.float32, 12)
    slots, positions = torch.tensor([23, -1, 4, 9]), torch.tensor([11, 99, 0, 5], dtype=torch.int32)
    given: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    flashgen.append_kv(k, v, cache.k, cache.v, slot_mapping=slots, rotary_seqlens=positions, **given)
    at = positions.clamp(max=11).tolist()
    turned = torch.stack([rotated(x, cos, sin, n, interleaved=interleaved) for x, n in zip(k, at, strict=True)])
    expect(cache, before, turned, v, {(0, 0): (2, 7), (2, 0): (0, 4), (3, 0): (1, 1)}, 1e-6)
    before = cache.copy()
    q, none = randn(4, 1, 2 * HEADS, DIM, seed=2), torch.empty(4, 0, HEADS, DIM)
    found = flashgen.append_kv(
        none, none, cache.k, cache.v, slot_mapping=slots[:0].clone(), rotary_seqlens=positions, q=q, **given
    )
    turned = torch.stack([rotated(x, cos, sin, n, interleaved=interleaved) for x, n in zip(q, at, strict=True)])
    torch.testing.assert_close(found.double(), turned, rtol=1e-6, atol=1e-6)
    expect(cache, before, none, none, {}, 0.0)


def test_queries_that_overlap_are_rotated_as_others() -> None:
    """`empty_like` of such strides has none that a kernel writes rows by."""
    q = torch.randn(200).unfold(0, 16, 1)[:8].view(1, 2, 4, 16)
    new, cache, tables = torch.zeros(1, 2, 1, 16), torch.zeros(1, 20, 1, 16), torch.rand(2, 40, 8)
    found, expected = (
        flashgen.append_kv(new, new, cache, cache.clone(), 3, rotary_cos=tables[0], rotary_sin=tables[1], q=x)
        for x in (q, q.contiguous())
    )
    torch.testing.assert_close(found, expected)


def test_nothing_new_changes_nothing() -> None:
    cache = Cache.made("nhd", BATCH, 8, (DIM, DIM), torch.float32)
    before = cache.copy()
    cos, sin = angles(16, torch.float32, 8)
    none, lengths = torch.empty(BATCH, 0, HEADS, DIM), torch.full((BATCH,), 3, dtype=torch.int32)
    flashgen.append_kv(none, none, cache.k, cache.v, lengths)
    q = randn(BATCH, 2, HEADS, DIM)
    found = flashgen.append_kv(none, none, cache.k, cache.v, lengths, rotary_cos=cos, rotary_sin=sin, q=q)
    torch.testing.assert_close(found[1, 1].double(), rotated(q[1, 1], cos, sin, 4, interleaved=True))
    empty, no_lengths = torch.empty(0, NEW, HEADS, DIM), torch.empty(0, dtype=torch.int32)
    assert flashgen.append_kv(empty, empty, cache.k, cache.v, no_lengths) is None
    slots = torch.empty(0, dtype=torch.int64)
    flashgen.append_kv(none[0], none[0], cache.k, cache.v, slot_mapping=slots)
    expect(cache, before, none, none, {}, 0.0)
