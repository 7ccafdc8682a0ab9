"""Calls of `flashgen.attention_varlen` of many kinds in turns, which no memo may take for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops import serve
from tests.fakes.turns import Call, Change, Kind, Results, Turns, changed
from tests.runtime.layouts import cut, evens, expanded, integers, odd, same, shifted, swapped
from tests.tiers import EXHAUSTIVE, first

Tensor = torch.Tensor


def shifted_integers(*shape: int) -> Tensor:
    return shifted(integers(*shape))


def wrong_integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def varlen(
    size: int,
    *,
    stream: int = 7,
    trains: str = "",
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 2),
    page: int | None = None,
    pages: int = 40,
    laid_q: Callable[[Tensor], Tensor] = same,
    laid_k: Callable[[Tensor], Tensor] = same,
    laid_table: Callable[[Tensor], Tensor] = same,
    laid_dout: Callable[[Tensor], Tensor] = same,
    ends: Callable[..., Tensor] = integers,
    own_ends: bool = True,
    used: Callable[..., Tensor] = integers,
    used_q: bool = False,
    used_k: bool = False,
    max_seqlen_q: int | None = None,
    slopes: str = "",
    sinks: torch.dtype | None = None,
    steps: int = 0,
    as_steps: bool = False,
    changes: Mapping[str, Change] = {},
    **options: Any,
) -> Call:
    """A call of packed sequences, over pages where there are some; `as_steps` is of its steps of decoding alone."""
    batch, rows = 5 + size % 3, 40 + 7 * size
    keys = rows if page is None and not own_ends else rows + 9 * size
    q = laid_q(torch.zeros(rows, heads[0], dims[0], dtype=dtype))
    shape = (keys,) if page is None else (pages, page)
    k, v = (torch.zeros(*shape, heads[1], dim, dtype=dtype) for dim in dims)
    given: dict[str, Any] = {"q": q, "k": laid_k(k), "v": v, "cu_seqlens_q": ends(batch + 1)}
    if page is not None:
        given["block_table"] = laid_table(integers(batch, 600 // page))
    elif own_ends:
        given["cu_seqlens_k"] = ends(batch + 1)
    if used_q:
        given["seqused_q"] = used(batch)
    if used_k or page is not None:
        given["seqused_k"] = used(batch)
    if slopes:
        given["alibi_slopes"] = torch.zeros(batch, heads[0]) if slopes == "each" else torch.zeros(heads[0])
    if sinks is not None:
        given["sinks"] = torch.zeros(heads[0], dtype=sinks)
    if options.get("dropout_p"):
        given["rng_state"] = torch.zeros(2, dtype=torch.int64)
    given |= {name: change(given[name]) for name, change in changes.items()}
    q, v, tensors = given["q"], given["v"], dict(given)
    given["max_seqlen_q"] = max_seqlen_q or 20 + size
    given["max_seqlen_k"] = None if page is not None or not own_ends else 30 + size
    given["num_decodes"] = steps
    wanted = [tensors[name] for name in trains.split()]

    def passes() -> Iterator[Results]:
        if as_steps:
            first = slice(0, 4)
            one = q[first].unsqueeze(1), given["k"], v, given["seqused_k"][first]
            yield {"out": flashgen.attention_decode(*one, block_table=given["block_table"][first], **options)}
            return
        for one in wanted:
            one.requires_grad_()
        out = flashgen.attention_varlen(**given, **options)
        results = dict(zip(("out", "lse"), out if isinstance(out, tuple) else (out,), strict=False))
        yield results
        if wanted:
            douts = [laid_dout(torch.zeros_like(one)) for one in results.values()]
            found = torch.autograd.grad(tuple(results.values()), wanted, douts)
            yield results | {f"d{name}": one for name, one in zip(trains.split(), found, strict=True)}

    return Call(tensors=tensors, passes=passes, stream=stream)


CAUSAL = {"causal": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head dims": {"dims": (128, 128)},
    "wide values": {"dims": (64, 128)},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "heads": {"heads": (6, 1)},
    "causal": CAUSAL,
    "the same ends": {"own_ends": False},
    "used queries": {"used_q": True},
    "used keys": {"used_k": True},
    "ends at odd addresses": {"ends": shifted_integers},
    "wrong ends": {"ends": wrong_integers},
    "ends apart": {"ends": lambda count: integers(2 * count)[::2]},
    "wrong numbers of used keys": {"used_k": True, "used": wrong_integers},
    "too many numbers of used keys": {"used_k": True, "used": lambda batch: integers(batch + 1)},
    "used keys apart": {"used_k": True, "used": lambda batch: integers(2 * batch)[::2]},
    "other bounds": {"max_seqlen_q": 39},
    "window": {"window": (8, None)},
    "wide window": {"window": (10**9, 0)},
    "window and causal": {"window": (8, None), **CAUSAL},
    "softcap": {"softcap": 30.0},
    "other softcap": {"softcap": 50.0},
    "scale": {"softmax_scale": 0.3},
    "lse": {"return_lse": True},
    "stream": {"stream": 9},
    "slopes": {"slopes": "shared"},
    "slopes of each": {"slopes": "each"},
    "sinks": {"sinks": torch.float32},
    "sinks bf16": {"sinks": torch.bfloat16},
    "mask_mod": {"mask_mod": evens},
    "dropout": {"dropout_p": 0.1},
    "other dropout": {"dropout_p": 0.5},
    "deterministic": {"deterministic": True},
    "odd address": {"laid_q": shifted},
    "odd strides": {"laid_q": odd},
    "heads first": {"laid_q": swapped},
    "cut": {"laid_q": cut, "laid_k": cut},
}
PAGED: dict[str, dict[str, Any]] = {
    "pages": {"page": 16},
    "large pages": {"page": 64},
    "more pages": {"page": 16, "pages": 90},
    "wrong table": {"page": 16, "laid_table": Tensor.long},
    "table by columns": {"page": 16, "laid_table": lambda table: table.t().contiguous().t()},
    "wrong numbers of keys": {"page": 16, "used": wrong_integers},
    "steps, wrong table": {"page": 16, "steps": 4, "laid_table": Tensor.long},
    "steps, wrong numbers of keys": {"page": 16, "steps": 4, "used": wrong_integers},
    "too many steps": {"page": 16, "steps": 99},
    "wide table": {"page": 16, "laid_table": odd},
    "pages at an odd address": {"page": 16, "laid_k": shifted},
    "steps": {"page": 16, "steps": 4},
    "fewer steps": {"page": 16, "steps": 3},
    "steps heads first": {"page": 16, "steps": 4, "laid_q": swapped, "softcap": 9.0},
    "steps alone heads first": {"page": 16, "as_steps": True, "laid_q": swapped, "softcap": 9.0},
    "steps at an odd address": {"page": 16, "steps": 4, "laid_q": shifted},
} | {
    f"{kind}, {name}": {**given, **KINDS[name]}
    for kind, given in {"pages": {"page": 16}, "steps": {"page": 16, "steps": 4}}.items()
    for name in (
        *("head dims", "wide values", "fp16", "fp32", "causal", "used queries", "window", "window and causal"),
        *("softcap", "other softcap", "scale", "lse", "slopes", "slopes of each", "sinks", "sinks bf16", "mask_mod"),
        *("deterministic", "odd strides", "cut"),
    )
}
TRAINED: dict[str, dict[str, Any]] = {
    f"{name}, trained": {"trains": "q k v", **KINDS[name]}
    for name in KINDS
    if name not in ("other bounds", "wide window")
} | {
    "odd gradient": {"trains": "q k v", "laid_dout": shifted},
    "odd strides of a gradient": {"trains": "q k v", "laid_dout": odd},
    "expanded gradient": {"trains": "q k v", "laid_dout": expanded},
    "sinks that are learned": {"trains": "q sinks", **KINDS["sinks"]},
}


def kinds_of(named: dict[str, dict[str, Any]]) -> dict[str, Kind]:
    return {name: partial(varlen, **given) for name, given in named.items()}


def test_forward_calls_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check(kinds_of(KINDS), range(3))
    assert serve._OPEN


def test_calls_over_pages_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check(kinds_of(PAGED), range(3))


def test_mixed_batches_and_their_steps_alone_are_launched_as_each_alone(turns: Turns) -> None:
    kinds = kinds_of(PAGED)
    turns.check({name: kinds[f"steps {name}"] for name in ("heads first", "alone heads first")}, range(3))


@EXHAUSTIVE
def test_backward_passes_in_turns_are_launched_as_each_alone(turns: Turns) -> None:
    turns.check(kinds_of({"plain": {}, "lse": {"return_lse": True}} | TRAINED), range(3))


CHANGED = (
    changed("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", used_q=True, used_k=True),
    changed("q", "k", "v", "cu_seqlens_q", "seqused_k", trains="q k v", used_k=True),
    changed("sinks", "alibi_slopes", "cu_seqlens_k", sinks=torch.float32, slopes="each"),
    changed("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table", page=16),
    changed("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table", page=16, steps=4),
)


@pytest.mark.parametrize("kinds", first(1, CHANGED))
def test_calls_of_which_a_tensor_is_another_one_are_launched_as_each_alone(
    turns: Turns, kinds: dict[str, dict[str, Any]]
) -> None:
    turns.check(kinds_of(kinds), range(3))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (r"cu_seqlens_q is int32 \(batch \+ 1,\)", {"cu_seqlens_q": integers(0)}),
        ("max_seqlen_q must be at most 2147483647", {"max_seqlen_q": 2**31}),
        ("max_seqlen_k must be at most 2147483647", {"max_seqlen_k": 2**40}),
    ],
)
def test_what_is_refused_at_first_is_refused_behind_calls_of_its_kind(
    turns: Turns, rule: str, changes: dict[str, Any]
) -> None:
    for size in range(4):
        turns.launched(varlen(size))
    assert serve._OPEN
    q = torch.zeros(40, 4, 64, dtype=torch.bfloat16)
    given = {"cu_seqlens_q": integers(6), "max_seqlen_q": 20, "cu_seqlens_k": integers(6), "max_seqlen_k": 30} | changes
    if len(given["cu_seqlens_q"]) != 6:
        given["cu_seqlens_k"] = given["cu_seqlens_q"]
    with pytest.raises(WorkloadError, match=rule):
        flashgen.attention_varlen(q, q[:, :2], q[:, :2], **given)
