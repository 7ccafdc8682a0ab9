"""Packed new keys and packed queries of version 3 over a cache, on the references: places, rotation, rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.core.settings import settings
from flashgen.flash_attn_interface import flash_attn_with_kvcache
from tests.integrations.flash_attn_calls import DV, HK, D, H, Tensor, assert_same, ends, plain, randn
from tests.rotary import rotated
from tests.tiers import first

KNOWN, NEW, QUERIES = (4, 9, 0), (3, 0, 5), (2, 1, 7)
PAGE, PAGES = 8, 3
SLOTS = PAGE * PAGES
KINDS = ("rows", "batch_idx", "leftpad", "pages", "pages of rows", "pages and leftpad")


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def caches(kind: str) -> tuple[Tensor, Tensor, dict[str, Any], Tensor, tuple[int, ...]]:
    """K, V, the arguments that say where sequences are, their slots in a flat cache, and each one's first slot."""
    first, rows = ((3, 2, 0) if "leftpad" in kind else (0, 0, 0)), (0, 1, 2)
    given: dict[str, Any] = {"cache_leftpad": int32(*first)} if any(first) else {}
    if kind in {"batch_idx", "pages of rows"}:
        rows = (3, 0, 1)
        given["cache_batch_idx"] = int32(*rows)
    if "pages" not in kind:
        k, v = (randn(5, SLOTS, HK, width) for width in (D, DV))
        return k, v, given, torch.arange(5 * SLOTS).view(5, SLOTS)[list(rows)], first
    table = torch.tensor([[3, 1, 6], [0, 5, 12], [2, 9, 11], [4, 8, 10]], dtype=torch.int32)
    given["page_table"] = table if kind == "pages of rows" else table[:3]
    k, v = (randn(14, PAGE, HK, width) for width in (D, DV))
    slots = (table.long()[list(rows), :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    return k, v, given, slots, first


def turned(x: Tensor, angles: tuple[Tensor, Tensor] | None, first: int, step: int, *, interleaved: bool) -> Tensor:
    """Tokens (tokens, nheads, head_dim) at positions from `first` on."""
    if angles is None or not len(x):
        return x
    return torch.stack([rotated(x[i], *angles, first + i * step, interleaved=interleaved) for i in range(len(x))])


@pytest.fixture
def with_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


ROTATION: list[dict[str, Any]] = [{}, {"rotary_interleaved": True}, {"rotary_interleaved": False, "from": (1, 14, 6)}]


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotation", ROTATION, ids=["still", "gptj", "neox"])
@pytest.mark.parametrize("scores", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
def test_packed_tokens_go_behind_the_keys_of_their_sequences(
    kind: str, rotation: dict[str, Any], scores: dict[str, Any]
) -> None:
    """Against each sequence in float64. One has no new keys; the first and the last token are of none."""
    k_cache, v_cache, given, slots, first = caches(kind)
    q, k, v = randn(sum(QUERIES), H, D), randn(sum(NEW) + 2, HK, D, seed=1), randn(sum(NEW) + 2, HK, DV)
    angles = (randn(SLOTS, D // 2).cos(), randn(SLOTS, D // 2).sin()) if rotation else None
    interleaved = rotation.get("rotary_interleaved", True)
    if angles is not None:
        given |= {"rotary_cos": angles[0], "rotary_sin": angles[1], "rotary_interleaved": interleaved}
    if "from" in rotation:
        given["rotary_seqlens"] = int32(*rotation["from"])
    whole = [cache.clone().flatten(0, 1) for cache in (k_cache, v_cache)]
    parts = zip(q.split(QUERIES), k[1:-1].split(NEW), v[1:-1].split(NEW), strict=True)
    expected = []
    for b, (some_q, some_k, new_v) in enumerate(parts):
        at, n = rotation.get("from", KNOWN)[b], KNOWN[b] + NEW[b]
        new_k = turned(some_k, angles, at, 1, interleaved=interleaved)
        own_q = turned(some_q, angles, at, int(bool(scores)), interleaved=interleaved)
        for cache, new in zip(whole, (new_k, new_v), strict=True):
            cache[slots[b, KNOWN[b] : n]] = new
        keys, values = (cache[slots[b, first[b] : n]][None] for cache in whole)
        rules = {{"window_size": "window"}.get(name, name): rule for name, rule in scores.items()}
        expected.append(plain(own_q[None], keys, values, **rules))
    packed = {"cu_seqlens_q": ends(QUERIES), "max_seqlen_q": max(QUERIES), "cu_seqlens_k_new": ends(NEW) + 1}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=int32(*KNOWN), return_softmax_lse=True, **packed, **given, **scores
    )
    assert_same([k_cache.flatten(0, 1), v_cache.flatten(0, 1)], whole)
    assert_same((out, lse), (torch.cat([o[0] for o, _ in expected]), torch.cat([one[0] for _, one in expected], 1)))


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("queries", [2, 18])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_packed_or_not_is_the_same(kind: str, causal: bool, queries: int, as_number: bool) -> None:
    """Queries or new keys that are packed beside others that are not, against a call without packed ones."""
    q, k, v = randn(3, queries, H, D), randn(3, 2, HK, D, seed=1), randn(3, 2, HK, DV)
    given: dict[str, Any] = {"cache_seqlens": 5 if as_number else int32(*KNOWN), "causal": causal}
    given |= {"rotary_cos": randn(SLOTS, D // 2).cos(), "rotary_sin": randn(SLOTS, D // 2).sin()}
    packed_q = {"cu_seqlens_q": ends((queries,) * 3), "max_seqlen_q": queries}
    wide = torch.stack([ends((2,) * 3), ends((2,) * 3)], 1)
    new = {"cu_seqlens_k_new": wide[:, 0]}  # of any stride, as FlashAttention takes it
    found = []
    for has_packed_q, has_packed_k in ((False, False), (True, False), (False, True), (True, True)):
        k_cache, v_cache, places, *_ = caches(kind)
        both = [x.flatten(0, 1) if has_packed_k else x for x in (k, v)]
        named = given | places | (packed_q if has_packed_q else {}) | (new if has_packed_k else {})
        out, lse = flash_attn_with_kvcache(
            q.flatten(0, 1) if has_packed_q else q, k_cache, v_cache, *both, return_softmax_lse=True, **named
        )
        lse = lse.unflatten(1, (3, queries)).transpose(0, 1) if has_packed_q else lse
        found.append((out.view(3, queries, H, DV), lse, k_cache, v_cache))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.usefixtures("on_reference")
def test_without_new_keys_where_they_begin_says_nothing() -> None:
    q, cache = randn(3, 2, H, D), randn(3, SLOTS, HK, D)
    given = {"cache_seqlens": int32(*KNOWN), "causal": True}
    found = flash_attn_with_kvcache(q, cache, cache, cu_seqlens_k_new=int32(0, 7), **given)
    assert_same(found, flash_attn_with_kvcache(q, cache, cache, **given))


def over(kind: str, known: tuple[int, ...], new: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The K cache after a call, as it was before, and the new keys."""
    k_cache, v_cache, given, *_ = caches(kind)
    before, k = k_cache.clone(), randn(sum(new), HK, D, seed=1)
    v = randn(sum(new), HK, DV)
    packed = {"cu_seqlens_k_new": ends(new), "cache_seqlens": int32(*known)}
    flash_attn_with_kvcache(randn(3, 2, H, D), k_cache, v_cache, k, v, **packed, **given)
    return k_cache, before, k


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_tokens_behind_the_end_of_a_sequence_are_left_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they go to the next row, or the first page; other sequences get theirs."""
    monkeypatch.setattr(flashgen, "attention_decode", lambda q, *others, **named: q)  # which checks lengths
    slots = caches(kind)[3]
    for nowhere in (2**31 - 1, -1):
        k_cache, before, k = over(kind, (SLOTS - 1, 2, nowhere), (3, 1, 2))
        expected = before.flatten(0, 1)
        expected[slots[0, -1]], expected[slots[1, 2]] = k[0], k[3]
        assert_same(k_cache.flatten(0, 1), expected)


@pytest.mark.usefixtures("on_reference")
def test_a_table_entry_without_a_page_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    k_cache, v_cache = (randn(4, PAGE, HK, width) for width in (D, DV))
    before, k, v = k_cache.clone(), randn(3, HK, D, seed=1), randn(3, HK, DV)
    table = int32(1, -1, 4, 0).view(2, 2)  # there is no page 4
    places: dict[str, Any] = {"cu_seqlens_k_new": int32(0, 2, 3), "page_table": table}
    expected = before.clone()
    expected[1, 7] = k[0]
    monkeypatch.setattr(flashgen, "attention_decode", lambda q, *others, **named: q)
    flash_attn_with_kvcache(randn(2, 1, H, D), k_cache, v_cache, k, v, cache_seqlens=int32(7, 0), **places)
    assert_same(k_cache, expected)


@pytest.mark.usefixtures("on_reference", "with_checks")
def test_checks_say_which_token_has_no_slot() -> None:
    over("rows", (SLOTS - 3, 2, 0), (3, 1, 2))
    for kind, words in (
        ("rows", "new keys go to positions of the cache that the sequence has a slot for; got 24 for token 2"),
        ("pages", "the 24 keys that block_table has room for, got 22 and 3"),
    ):
        with pytest.raises(WorkloadError, match=words):
            over(kind, (SLOTS - 2, 23, 0), (3, 1, 2))
    k_cache, v_cache, given, *_ = caches("rows")
    q, k = randn(3, 1, H, D), randn(4, HK, D)
    for wrong, words in (
        (int32(0, 2, 1, 4), "cu_seqlens_k_new never falls.*; got -1 for sequence 1"),
        (int32(0, 2, 3, 5), "cu_seqlens_k_new is at most 4, the tokens of k; got 5 for entry 3"),
    ):
        with pytest.raises(WorkloadError, match=words):
            flash_attn_with_kvcache(
                q, k_cache, v_cache, k, k[..., :DV].clone(), cache_seqlens=0, cu_seqlens_k_new=wrong, **given
            )


@pytest.fixture
def within_angles(on_reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are given lie within the angles, as FLASHGEN_CHECKS=1 asks of `flashgen.append_kv`."""
    append_kv = flashgen.append_kv

    def checked(*tensors: Any, **named: Any) -> Any:
        positions = named.get("rotary_seqlens")
        assert positions is None or ((positions >= 0) & (positions < SLOTS)).all()
        return append_kv(*tensors, **named)

    monkeypatch.setattr(flashgen, "append_kv", checked)


@pytest.mark.usefixtures("within_angles")
def test_a_token_of_no_sequence_needs_no_angles() -> None:
    k_cache, v_cache, *_ = caches("rows")
    q, k, v = randn(3, 1, H, D), randn(4, HK, D, seed=1), randn(4, HK, DV)
    angles = {"rotary_cos": torch.ones(SLOTS, D // 2), "rotary_sin": torch.zeros(SLOTS, D // 2)}
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=SLOTS - 1, cu_seqlens_k_new=int32(0, 1, 2, 3), **angles
    )
    assert_same(k_cache[:3, -1], k[:3])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_k_new": ends(NEW).long()}, r"cu_seqlens_k_new is torch.int32 \(4,\) on cpu.*got torch.int64 \(4,\)"),
    ({"cu_seqlens_k_new": ends(NEW)[1:]}, r"cu_seqlens_k_new is torch.int32 \(4,\).*got torch.int32 \(3,\)"),
    ({"cu_seqlens_k_new": 3}, "cu_seqlens_k_new must be a tensor"),
    ({"k": randn(3, 2, HK, D)}, r"with cu_seqlens_k_new k is \(total_k_new, nheads_k, head_dim\)"),
    ({"v": randn(sum(NEW) - 1, HK, DV)}, "and v the same with head_dim_v, got"),
    ({"v": None}, "come together"),
    ({"cache_seqlens": None}, "go behind cache_seqlens"),
    ({"cache_seqlens": int32(1, 2)}, r"cache_seqlens is torch.int32 \(3,\)"),
    ({"cache_seqlens": SLOTS + 1}, f"cache_seqlens, where it is no tensor, .*{SLOTS}"),
    ({"cache_batch_idx": int32(1, 2)}, r"cache_batch_idx is torch.int32 \(3,\)"),
    ({"cache_leftpad": int32(1, 2)}, r"cache_leftpad is torch.int32 \(3,\)"),
    ({"page_table": int32(1, 2, 0)}, r"the block table is torch.int32 \(3, 3\).*got torch.int32 \(3,\)"),
    ({"k_cache": randn(2, SLOTS, HK, D), "v_cache": randn(2, SLOTS, HK, DV)}, "a row for each sequence.*got 2 rows"),
    ({"k_cache": randn(SLOTS, HK, D)}, "k_cache is"),
    ({"rotary_cos": randn(SLOTS, D // 2)}, "come together"),
    ({"rotary_cos": randn(9, D // 2), "rotary_sin": randn(9, D // 2)}, "got 9 positions and 24 slots"),
    ({"rotary_cos": 3.0, "rotary_sin": 3.0}, "rotary_cos must be a tensor"),
    (
        {"rotary_cos": randn(9, D // 2), "rotary_sin": randn(9, D // 2), "rotary_seqlens": int32(1)},
        r"rotary_seqlens is torch.int32 \(3,\)",
    ),
]


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_rules_are_named_and_nothing_is_written(changes: dict[str, Any], words: str) -> None:
    k_cache, v_cache, *_ = caches("rows")
    given: dict[str, Any] = {"q": randn(3, 2, H, D), "k_cache": k_cache, "v_cache": v_cache}
    given |= {"k": randn(sum(NEW), HK, D), "v": randn(sum(NEW), HK, DV), "cache_seqlens": int32(*KNOWN)}
    given["cu_seqlens_k_new"] = ends(NEW)
    before = k_cache.clone()
    with pytest.raises(WorkloadError, match=words):
        flash_attn_with_kvcache(**(given | changes))
    assert_same(k_cache, before)
    flash_attn_with_kvcache(**given)
    assert not torch.equal(k_cache, before)


@pytest.mark.usefixtures("on_reference")
def test_rotated_packed_queries_have_rules_of_their_own() -> None:
    k_cache, v_cache, *_ = caches("rows")
    before, new = k_cache.clone(), (randn(3, 2, HK, D), randn(3, 2, HK, DV))
    angles = {"rotary_cos": randn(SLOTS, D // 2), "rotary_sin": randn(SLOTS, D // 2)}
    for q, places, words in (
        (randn(10, H, D), ends(QUERIES).long(), r"cu_seqlens_q is torch.int32 \(4,\)"),
        (randn(10, 1, H, D), ends(QUERIES), r"q is \(total_q, nheads, head_dim\) in .* got torch.float64 \(10, 1"),
    ):
        with pytest.raises(WorkloadError, match=words):
            flash_attn_with_kvcache(
                q, k_cache, v_cache, *new, cache_seqlens=1, cu_seqlens_q=places, max_seqlen_q=7, **angles
            )
    assert_same(k_cache, before)


@pytest.mark.usefixtures("within_angles")
def test_queries_behind_the_angles_take_the_last_one() -> None:
    """As those do that are not packed."""
    q, k, v = randn(3, 4, H, D), randn(3, 1, HK, D, seed=1), randn(3, 1, HK, DV)
    given: dict[str, Any] = {"cache_seqlens": SLOTS - 1, "causal": True}
    given |= {"rotary_cos": randn(SLOTS, D // 2).cos(), "rotary_sin": randn(SLOTS, D // 2).sin()}
    packed = {"cu_seqlens_q": ends((4,) * 3), "max_seqlen_q": 4}
    found = [
        flash_attn_with_kvcache(x, *caches("rows")[:2], k, v, **given, **more)
        for x, more in ((q, {}), (q.flatten(0, 1), packed))
    ]
    assert_same(found[1].view(found[0].shape), found[0])


@pytest.mark.parametrize("is_paged", [False, True])
def test_nothing_is_copied_to_the_host(is_paged: bool) -> None:
    """Tensors without data have no numbers: what a call would read of them is an error."""
    with FakeTensorMode(), torch.no_grad():

        def bf16(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16)

        numbers = {name: torch.empty(n, dtype=torch.int32) for name, n in (("lengths", 2), ("ends", 3))}
        given: dict[str, Any] = {"cu_seqlens_q": numbers["ends"], "cu_seqlens_k_new": numbers["ends"]}
        given |= {"rotary_cos": bf16(128, 16), "rotary_sin": bf16(128, 16), "max_seqlen_q": 7, "causal": True}
        given |= {"page_table": torch.empty(2, 2, dtype=torch.int32)} if is_paged else {}
        out = flash_attn_with_kvcache(
            bf16(10, 8, 64), bf16(4, 64, 2, 64), bf16(4, 64, 2, 64), bf16(8, 2, 64), bf16(8, 2, 64),
            cache_seqlens=numbers["lengths"], **given,
        )  # fmt: skip
        assert out.shape == (10, 8, 64)


@pytest.mark.parametrize("is_paged", first(1, [True, False]))
def test_torch_compile_traces_it_in_one_graph(is_paged: bool) -> None:
    """Of flashgen's ops, which have no kernel here: the graph is looked at, and not run."""
    ops: list[str] = []

    class NotRunError(Exception):
        pass

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes if "flashgen" in str(node.target))

        def run(*given: Any) -> Any:
            raise NotRunError

        return run

    q, k, cache = (torch.zeros(*shape, 2, 64).bfloat16() for shape in ((10,), (8,), (4, 64)))
    angles = torch.zeros(128, 16).bfloat16()
    table = torch.zeros(2, 2, dtype=torch.int32) if is_paged else None

    def call(lengths: Tensor, places: Tensor) -> Any:
        given: dict[str, Any] = {"cu_seqlens_q": places, "cu_seqlens_k_new": places, "max_seqlen_q": 7, "causal": True}
        given |= {"rotary_cos": angles, "rotary_sin": angles, "page_table": table, "cache_seqlens": lengths}
        return flash_attn_with_kvcache(q, cache, cache.clone(), k, k, **given)

    with torch.no_grad(), pytest.raises(NotRunError):
        torch.compile(call, backend=backend, fullgraph=True)(int32(3, 0), int32(0, 5, 8))
    assert ops == ["flashgen.append_kv_q.default", "flashgen.append_kv.default", "flashgen.attention_features.default"]
