"""One process that asks for many kinds of calls in turns, as servers and training programs do, against the references.

What a call leaves behind (keys of the memo, plans that are open to sizes, numbers that launches remember, memory of
captured graphs) must not reach a call of another kind.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen import reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

Tensor = torch.Tensor
Call = tuple[str, list[Tensor], dict[str, Any]]
"""A function of flashgen by name, its floating-point tensors, and the rest of its arguments by name."""

ROUNDS = 6
"""Of all kinds, in another order each time: a kind is open to sizes after two, and recent after three."""

SCORES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 0)},
    "softcap": {"causal": True, "softcap": 20.0},
    "scale": {"causal": True, "softmax_scale": 0.2},
}
HEADS = ((4, 64), (8, 128))
"""Query heads and head dim; two heads of keys."""


def values(draw: random.Random, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(draw.getrandbits(31))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def dense(draw: random.Random, heads: tuple[int, int], scores: str, dtype: torch.dtype) -> Call:
    (nheads, head_dim), batch, rows = heads, draw.randint(1, 3), draw.randint(17, 300)
    keys = rows + draw.randint(0, 200)
    tensors = [values(draw, batch, n, h, head_dim, dtype=dtype) for n, h in ((rows, nheads), (keys, 2), (keys, 2))]
    return "attention", tensors, {**SCORES[scores], "layout": "bshd"}


def packed(draw: random.Random, heads: tuple[int, int], scores: str, dtype: torch.dtype) -> Call:
    (nheads, head_dim), rows = heads, [draw.randint(0, 150) for _ in range(draw.randint(1, 5))] + [20]
    keys = [n + draw.randint(0, 100) for n in rows]
    tensors = [values(draw, sum(n), h, head_dim, dtype=dtype) for n, h in ((rows, nheads), (keys, 2), (keys, 2))]
    places = {"cu_seqlens_q": ends(rows), "cu_seqlens_k": ends(keys)}
    return (
        "attention_varlen",
        tensors,
        {**SCORES[scores], **places, "max_seqlen_q": max(rows), "max_seqlen_k": max(keys)},
    )


def cache(draw: random.Random, heads: tuple[int, int], batch: int, page: int) -> tuple[list[Tensor], dict[str, Any]]:
    """K and V of a cache, and the table of its pages; a page of 0 is a row of the cache for each sequence."""
    slots = 64 * draw.randint(5, 8)
    if not page:
        return [values(draw, batch, slots, 2, heads[1]) for _ in range(2)], {}
    count = batch * slots // page
    table = torch.randperm(count, device="cuda").int().view(batch, -1)
    return [values(draw, count, page, 2, heads[1]) for _ in range(2)], {"block_table": table}


def decode(draw: random.Random, heads: tuple[int, int], scores: str, page: int) -> Call:
    batch, rows = draw.randint(1, 5), draw.choice((1, 1, 4))
    both, named = cache(draw, heads, batch, page)
    named["seqlens"] = torch.tensor([draw.randint(rows, 320) for _ in range(batch)], device="cuda").int()
    return "attention_decode", [values(draw, batch, rows, *heads), *both], {**SCORES[scores], **named}


def chunks(draw: random.Random, heads: tuple[int, int], scores: str, page: int) -> Call:
    rows = [draw.randint(1, 100) for _ in range(draw.randint(1, 4))]
    both, named = cache(draw, heads, len(rows), page)
    named["seqused_k"] = torch.tensor([draw.randint(n, 320) for n in rows], device="cuda").int()
    named |= {"cu_seqlens_q": ends(rows), "max_seqlen_q": max(rows)}
    return "attention_varlen", [values(draw, sum(rows), *heads), *both], {**SCORES[scores], **named}


Kind = tuple[Callable[..., Call], tuple[int, int], str, Any]


def kinds(make: Callable[..., Call], scores: tuple[str, ...], what: tuple[Any, ...]) -> list[Kind]:
    """One for every heads, scores, and dtype or size of a page."""
    return list(itertools.product([make], HEADS, scores, what))


BOTH = (torch.bfloat16, torch.float16)
KINDS = {
    "dense": kinds(dense, ("full", "causal", "window", "scale"), BOTH[:1]) + kinds(dense, ("causal",), BOTH[1:]),
    "packed": kinds(packed, ("full", "causal", "window", "scale", "softcap"), BOTH[:1]),
    "caches": kinds(decode, ("causal", "window"), (0, 16)) + kinds(chunks, ("causal", "scale"), (16, 64)),
}
TRAINS = [kind for name in ("dense", "packed") for kind in KINDS[name] if kind[2] in ("causal", "full", "scale")]


def in_turns(kinds: list[Kind], seed: int) -> list[tuple[str, Call]]:
    draw, found = random.Random(seed), []
    for _ in range(ROUNDS):
        for make, *what in draw.sample(kinds, len(kinds)):
            found.append((f"{make.__name__} {what}", make(draw, *what)))
    return found


def assert_near(found: Tensor, right: Tensor, where: str) -> None:
    error = (found.double() - right.double()).abs().max().item()
    assert error <= 0.02 * max(right.abs().max().item(), 1), f"{where}: off by {error}"


@pytest.mark.parametrize("name", list(KINDS))
def test_each_of_many_kinds_in_turns_is_right(name: str) -> None:
    for number, (what, (function, tensors, named)) in enumerate(in_turns(KINDS[name], seed=1)):
        out, lse = getattr(flashgen, function)(*tensors, **named, return_lse=True)
        right, right_lse = getattr(reference, function)(*(x.double() for x in tensors), **named, return_lse=True)
        assert_near(out, right, f"call {number}, {what}")
        seen = right_lse != -torch.inf
        assert_near(lse[seen], right_lse[seen], f"LSE of call {number}, {what}")


def test_each_of_many_kinds_in_turns_has_right_gradients() -> None:
    for number, (what, (function, tensors, named)) in enumerate(in_turns(TRAINS, seed=2)):
        gradients = []
        for call, dtype in ((getattr(flashgen, function), None), (getattr(reference, function), torch.float64)):
            leaves = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]
            out = call(*leaves, **named)
            gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
        for found, right in zip(*gradients, strict=True):
            assert_near(found, right, f"call {number}, {what}")


RAGGED = (
    ([130, 130, 20], [176, 195, 106]),
    ([1, 300, 0, 64, 17], [40, 300, 9, 200, 130]),
    ([5] * 40, [9] * 40),
)
"""Queries and keys of sequences with last blocks that are mostly empty: there are fewer blocks than the bound says."""

REPEATS = 100


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_calls_are_the_same_again_and_again(heads: tuple[int, int], causal: bool, deterministic: bool) -> None:
    """CTAs have to agree on how many tiles there are, whichever warp is ahead; what none computed is NaN."""
    draw, (nheads, head_dim) = random.Random(3), heads
    for rows, keys in RAGGED:
        leaves = [values(draw, sum(n), h, head_dim) for n, h in ((rows, nheads), (keys, 2), (keys, 2))]
        named: dict[str, Any] = {"causal": causal, "cu_seqlens_q": ends(rows), "cu_seqlens_k": ends(keys)}
        named |= {"max_seqlen_q": max(rows), "max_seqlen_k": max(keys)}

        def results(call: Callable[..., Any], tensors: list[Tensor], **more: Any) -> tuple[Tensor, ...]:
            own = [tensor.detach().requires_grad_() for tensor in tensors]
            out = call(*own, **named, **more)  # noqa: B023 - called in this round
            return out.detach(), *torch.autograd.grad(out, own, torch.ones_like(out))

        right = results(reference.attention_varlen, [leaf.double() for leaf in leaves])
        first: tuple[Tensor, ...] = ()
        for number in range(REPEATS):
            spoilt = [torch.full((1 << size,), torch.nan, device="cuda") for size in (10, 12, 14, 16, 18, 20)]
            del spoilt
            found = results(flashgen.attention_varlen, leaves, deterministic=deterministic)
            first = first or found
            for name, one, exact, again in zip(("out", "dq", "dk", "dv"), found, right, first, strict=True):
                assert_near(one, exact, f"{name} of call {number}, {rows}")
                if name != "dq" or deterministic:  # whose sums are in any order
                    assert torch.equal(one, again), f"{name} of call {number}, {rows}"
