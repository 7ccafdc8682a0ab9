"""Calls of many kinds in turns, which no memo may take for each other: steps of decoding, new keys, merged states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

import flashgen
from flashgen.runtime.decode.open_calls import OPEN
from flashgen.runtime.decode.recent import RECENT
from tests.fakes.turns import Call, Change, Results, Turns, changed
from tests.runtime.layouts import cut, expanded, integers, odd, odd_steps, same, shifted, swapped
from tests.tiers import first

Tensor = torch.Tensor
PAGES = 6


def every_other(numbers: Tensor) -> Tensor:
    """The same with as many between them."""
    return torch.zeros(*numbers.shape[:-1], 2 * numbers.shape[-1], dtype=numbers.dtype)[..., ::2]


def by_columns(numbers: Tensor) -> Tensor:
    """The same with columns side by side in memory."""
    return numbers.t().contiguous().t()


def step(
    size: int,
    *,
    stream: int = 7,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (8, 2),
    page: int | None = None,
    pages: int = PAGES,
    batches: tuple[int, ...] = (3, 5, 2, 9),
    columns: tuple[int, ...] = (4, 9, 30, 3),
    laid_q: Callable[[Tensor], Tensor] = same,
    laid_k: Callable[[Tensor], Tensor] = same,
    laid_lens: Callable[[Tensor], Tensor] = same,
    laid_table: Callable[[Tensor], Tensor] = same,
    leftpad: bool = False,
    batch_idx: bool = False,
    slopes: str = "",
    sinks: torch.dtype | None = None,
    prefix: int = 0,
    starts: tuple[int, ...] = (),
    requires_grad: bool = False,
    changes: Mapping[str, Change] = {},
    **options: Any,
) -> Call:
    """A step of decoding."""
    batch, room = batches[size], 16 * columns[size]
    rows = pages if page else 12 if batch_idx else batch
    q = laid_q(torch.zeros(batch, queries, heads[0], dims[0], dtype=dtype))
    k, v = (torch.zeros(rows, page or room, heads[1], dim, dtype=dtype) for dim in dims)
    given: dict[str, Any] = {"q": q, "k_cache": laid_k(k), "v_cache": v, "seqlens": laid_lens(integers(batch))}
    if page:
        given["block_table"] = laid_table(integers(batch, columns[size]))
    if leftpad:
        given["leftpad"] = laid_lens(integers(batch))
    if batch_idx:
        given["batch_idx"] = laid_lens(integers(batch))
    if slopes:
        given["alibi_slopes"] = torch.zeros(batch, heads[0]) if slopes == "each" else torch.zeros(heads[0])
    if sinks is not None:
        given["sinks"] = torch.zeros(heads[0], dtype=sinks)
    given |= {name: change(given[name]) for name, change in changes.items()}
    tensors = dict(given)
    if prefix:
        shared = [torch.zeros(prefix, 128, heads[1], dim, dtype=dtype) for dim in dims]
        lens = integers(prefix)
        given["prefix"] = flashgen.Prefix(seqlens=lens, k=shared[0], v=shared[1], group_starts=starts)
        tensors |= {"prefix k": shared[0], "prefix v": shared[1], "prefix lens": lens}
    q.requires_grad_(requires_grad)

    def passes() -> Iterator[Results]:
        out = flashgen.attention_decode(**given, **options)
        yield dict(zip(("out", "lse"), out if isinstance(out, tuple) else (out,), strict=False))

    return Call(tensors=tensors, passes=passes, stream=stream)


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": 9},
    "queries": {"queries": 3},
    "causal": {"queries": 3, "causal": True},
    "head dims": {"dims": (128, 128)},
    "wide values": {"dims": (64, 128)},
    "fp16": {"dtype": torch.float16},
    "heads": {"heads": (8, 8)},
    "lse": {"return_lse": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window": (20, None)},
    "other window": {"window": (50, 0)},
    "softcap": {"softcap": 20.0},
    "other softcap": {"softcap": 30.0},
    "slopes": {"slopes": "shared"},
    "slopes of each": {"slopes": "each"},
    "sinks": {"sinks": torch.float32},
    "sinks bf16": {"sinks": torch.bfloat16},
    "sinks and slopes": {"sinks": torch.float32, "slopes": "shared"},
    "leftpad": {"leftpad": True},
    "rows": {"batch_idx": True},
    "leftpad and rows": {"leftpad": True, "batch_idx": True},
    "fixed splits": {"fixed_split_size": 128},
    "other fixed splits": {"fixed_split_size": 256},
    "odd address": {"laid_q": shifted},
    "odd strides": {"laid_q": odd},
    "heads of queries first": {"laid_q": swapped, "queries": 2},
    "cut": {"laid_q": cut, "laid_k": cut},
    "odd address of keys": {"laid_k": shifted},
    "heads first": {"laid_k": swapped},
    "lengths apart": {"laid_lens": every_other},
    "one length": {"laid_lens": expanded, "batches": (1, 4, 1, 2)},
    "one length and rows": {"laid_lens": expanded, "batches": (1, 4, 1, 2), "batch_idx": True},
    "odd steps of queries": {"laid_q": odd_steps, "batches": (1, 4, 1, 2)},
    "pages": {"page": 16},
    "large pages": {"page": 64},
    "more pages": {"page": 16, "pages": 50},
    "pages and sinks": {"page": 16, "sinks": torch.float32},
    "pages and window": {"page": 16, "window": (20, None)},
    "pages and slopes of each": {"page": 16, "slopes": "each"},
    "table by columns": {"page": 16, "laid_table": by_columns, "columns": (1, 1, 3, 2), "batches": (3, 3, 3, 3)},
    "table with gaps": {"page": 16, "laid_table": every_other, "columns": (1, 3, 1, 2)},
    "wrong lengths": {"laid_lens": Tensor.long},
    "too many lengths": {"laid_lens": lambda lens: integers(len(lens) + 1)},
    "wrong lengths and padding": {"laid_lens": Tensor.long, "leftpad": True},
    "wrong table": {"page": 16, "laid_table": Tensor.long},
    "trained": {"requires_grad": True},
    "prefix": {"prefix": 1},
    "prefixes": {"prefix": 2, "batches": (4, 6, 2, 8)},
    "prefixes that start": {"prefix": 2, "starts": (0, 1)},
    "prefix and lse": {"prefix": 1, "return_lse": True},
    "prefix and window": {"prefix": 1, "window": (20, None)},
    "prefix and scale": {"prefix": 1, "softmax_scale": 0.3},
    "prefix and softcap": {"prefix": 1, "softcap": 20.0},
    "prefix and slopes": {"prefix": 1, "slopes": "shared"},
    "prefix and slopes of each": {"prefix": 1, "slopes": "each"},
    "prefix and sinks": {"prefix": 1, "sinks": torch.float32},
    "prefix and pages": {"prefix": 1, "page": 16},
    "prefix and fixed splits": {"prefix": 1, "fixed_split_size": 128},
}


CHANGED_STEPS = (
    changed("q", "k_cache", "v_cache", "seqlens", "block_table", page=16),
    changed("k_cache", "v_cache", "leftpad", "batch_idx", leftpad=True, batch_idx=True),
    changed("sinks", "alibi_slopes", sinks=torch.float32, slopes="each"),
    changed("alibi_slopes", slopes="shared"),
    changed("k_cache", "v_cache", "seqlens", prefix=1),
)


@pytest.mark.parametrize("kinds", first(1, CHANGED_STEPS))
def test_steps_of_which_a_tensor_is_another_one_are_launched_as_each_alone(
    turns: Turns, kinds: dict[str, dict[str, Any]]
) -> None:
    turns.check({name: partial(step, **given) for name, given in kinds.items()}, range(3))


def test_steps_of_decoding_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check({name: partial(step, **given) for name, given in STEPS.items()}, range(4), repeats=3)
    assert OPEN
    assert RECENT


def new_keys(
    size: int,
    *,
    stream: int = 7,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (64, 64),
    heads: int = 2,
    place: str = "rows",
    page: int = 16,
    pages: int = 40,
    seqlens: int | str = "each",
    laid_k: Callable[[Tensor], Tensor] = same,
    laid_cache: Callable[[Tensor], Tensor] = same,
    laid_table: Callable[[Tensor], Tensor] = same,
    apart: int | None = None,
    inside: bool = False,
    rotary: int = 0,
    table: torch.dtype = torch.float32,
    laid_rotary: Callable[[Tensor], Tensor] = same,
    starts: bool = False,
    queries: bool = False,
    batch_idx: bool = False,
    leftpad: bool = False,
    changes: Mapping[str, Change] = {},
    **options: Any,
) -> Call:
    """New keys and values into caches, which may lie so many numbers apart, and the new keys inside of them."""
    batch, count = (3, 2, 5, 1)[size], (1, 1, 7, 16)[size]
    room = pages * page if place == "rows" else page
    shape = (batch if place == "rows" else pages, room if place == "rows" else page, heads)
    k, v = (torch.zeros(batch, count, heads, dim, dtype=dtype) for dim in dims)
    if place == "flat":
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    caches = [laid_cache(torch.zeros(*shape, dim, dtype=dtype)) for dim in dims]
    if apart is not None:
        width = caches[0].numel()
        whole = torch.zeros(2 * width + abs(apart), dtype=dtype)
        caches = [whole[start : start + width].view(caches[0].shape) for start in (0, width + apart)]
    if inside:
        k = caches[0][:, :count]
    given: dict[str, Any] = {"k": laid_k(k), "v": v, "k_cache": caches[0], "v_cache": caches[1]}
    given["seqlens"] = None if place == "flat" or not seqlens else integers(batch) if seqlens == "each" else seqlens
    if place == "pages":
        given["block_table"] = laid_table(integers(batch, 3))
    if place in ("slots", "flat"):
        given["slot_mapping"] = torch.zeros(batch * count, dtype=torch.int64)
    if rotary:
        cos, sin = (laid_rotary(torch.zeros(pages * page, rotary // 2, dtype=table)) for _ in range(2))
        given |= {"rotary_cos": cos, "rotary_sin": sin}
    if starts:
        given["rotary_seqlens"] = integers(batch)
    if queries:
        given["q"] = torch.zeros(batch, count, 2 * heads, dims[0], dtype=dtype)

    if batch_idx:
        given["batch_idx"] = integers(batch)
    if leftpad:
        given["leftpad"] = integers(batch)
    given |= {name: change(given[name]) for name, change in changes.items()}

    def passes() -> Iterator[Results]:
        yield {"q_out": flashgen.append_kv(**given, **options)}

    return Call(
        tensors={name: one for name, one in given.items() if isinstance(one, Tensor)}, passes=passes, stream=stream
    )


APPENDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": 9},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "head dims": {"dims": (128, 128)},
    "wide values": {"dims": (64, 128)},
    "heads": {"heads": 4},
    "no lengths": {"seqlens": ""},
    "slots and no lengths": {"place": "slots", "seqlens": ""},
    "slots and a length": {"place": "slots", "seqlens": 5},
    "rows": {"batch_idx": True},
    "padding": {"leftpad": True},
    "a length": {"seqlens": 5},
    "another length": {"seqlens": 6},
    "a length that is too long": {"seqlens": 40 * 16},
    "pages": {"place": "pages"},
    "large pages": {"place": "pages", "page": 64},
    "more pages": {"place": "pages", "pages": 60},
    "table by columns": {"place": "pages", "laid_table": by_columns},
    "wide table": {"place": "pages", "laid_table": cut},
    "slots": {"place": "slots"},
    "slots of packed tokens": {"place": "flat"},
    "odd address": {"laid_k": shifted},
    "odd strides": {"laid_cache": odd},
    "cut": {"laid_k": cut, "laid_cache": cut},
    "heads first": {"laid_cache": swapped},
    "caches side by side": {"apart": 0},
    "caches that are close": {"apart": 64},
    "caches that overlap": {"apart": -64},
    "keys of the cache": {"inside": True},
    "keys of one of two caches": {"inside": True, "apart": 0},
    "rotary": {"rotary": 32},
    "rotary of all": {"rotary": 64},
    "rotary in bf16": {"rotary": 32, "table": torch.bfloat16},
    "rotary halves": {"rotary": 32, "rotary_interleaved": False},
    "rotary at an odd address": {"rotary": 32, "laid_rotary": shifted},
    "rotary odd": {"rotary": 32, "laid_rotary": odd},
    "rotary and starts": {"rotary": 32, "starts": True},
    "queries": {"rotary": 32, "queries": True},
    "queries at one place": {"rotary": 32, "queries": True, "q_causal": False},
    "queries and pages": {"rotary": 32, "queries": True, "place": "pages", "starts": True},
}


CHANGED_KEYS = (
    changed("k", "v", "k_cache", "v_cache", "seqlens", "block_table", place="pages"),
    changed("slot_mapping", place="slots"),
    changed("k", "v_cache", "batch_idx", "leftpad", batch_idx=True, leftpad=True),
    changed("rotary_cos", "rotary_sin", "rotary_seqlens", "q", rotary=32, starts=True, queries=True),
)


@pytest.mark.parametrize("kinds", first(1, CHANGED_KEYS))
def test_new_keys_of_which_a_tensor_is_another_one_are_written_as_each_alone(
    turns: Turns, kinds: dict[str, dict[str, Any]]
) -> None:
    turns.check({name: partial(new_keys, **given) for name, given in kinds.items()}, range(3))


def test_new_keys_in_turns_are_written_as_each_alone(turns: Turns) -> None:
    turns.check({name: partial(new_keys, **given) for name, given in APPENDED.items()}, range(4))


def states(
    size: int,
    *,
    stream: int = 7,
    count: int = 2,
    made_of: torch.dtype = torch.bfloat16,
    dim: int = 64,
    layout: str = "bhsd",
    is_stacked: bool = False,
    laid: Callable[[Tensor], Tensor] = same,
    laid_lse: Callable[[Tensor], Tensor] = same,
    moved: int = 0,
    **options: Any,
) -> Call:
    """States to be merged; of the sequence of all, `moved` more than half are outputs."""
    batch, heads, rows = 1 + size % 2, 4, 20 + size
    axes = {"bhsd": (batch, heads, rows), "bshd": (batch, rows, heads), "thd": (rows, heads)}[layout]
    lse_axes = {"bhsd": axes, "bshd": (batch, heads, rows), "thd": (heads, rows)}[layout]
    outs = [laid(torch.zeros(*axes, dim, dtype=made_of)) for _ in range(count)]
    lses = [laid_lse(torch.zeros(*lse_axes)) for _ in range(count)]
    outs, lses = [*outs, *lses[:moved]], lses[moved:]
    given: Any = (torch.stack(outs), torch.stack(lses)) if is_stacked else (outs, lses)
    tensors = dict(enumerate([*outs, *lses] if not is_stacked else given))

    def passes() -> Iterator[Results]:
        yield dict(zip(("out", "lse"), flashgen.merge_states(*given, layout=layout, **options), strict=True))

    return Call(tensors={str(name): one for name, one in tensors.items()}, passes=passes, stream=stream)


MERGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": 9},
    "three": {"count": 3},
    "six": {"count": 6},
    "stacked": {"is_stacked": True},
    "three stacked": {"is_stacked": True, "count": 3},
    "fp16": {"made_of": torch.float16},
    "fp32": {"made_of": torch.float32},
    "in fp32": {"dtype": torch.float32},
    "head dim": {"dim": 128},
    "bshd": {"layout": "bshd"},
    "thd": {"layout": "thd"},
    "an lse among the outputs": {"moved": 1},
    "odd address": {"laid": shifted},
    "odd strides": {"laid": odd},
    "heads and rows": {"laid": swapped, "laid_lse": lambda lse: lse.transpose(-1, -2).contiguous().transpose(-1, -2)},
}


def test_states_in_turns_are_merged_as_each_alone(turns: Turns) -> None:
    turns.check({name: partial(states, **given) for name, given in MERGED.items()}, range(4))
