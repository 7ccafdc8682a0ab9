"""Decode calls of `overhead`: steps of 16 sequences, and of batches that the process has not seen, beside SDPA."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import flashgen
from benchmarks.overhead_cases import MOST_NEW_SEQLENS, Arguments, Case
from flashgen.core.workload import Workload

STEP = Workload.parse("dec-b16-h32-hk8-sk1024-d128-page16")
"""Sequences have few keys in caches that have room for these, so that kernels are shorter than calls."""

LENGTH = 20
FIRST_BATCH, BATCHES, FIRST_COLUMNS, COLUMNS = 17, 112, 33, 32
"""Sizes of new batches: of three classes of batches and one of keys."""


def decode_cases() -> list[Case]:
    """One layer's call over a contiguous and a paged cache, with sizes as ever and new ones, and SDPA of as much."""
    pool = _pages()
    q, table, lens = _step(STEP.batch, STEP.seqlen_k // pool[0].shape[1])
    contiguous = tuple(one.view(STEP.batch, -1, *one.shape[2:]) for one in pool)
    decode, paged = flashgen.attention_decode, partial(_paged, pool)

    def same(*tensors: torch.Tensor) -> Callable[[int, int], list[Arguments]]:
        a, b, c = tensors
        return lambda loop, calls: [(a, b, c)] * calls

    def case(name: str, call: Callable[..., object], arguments: Callable[[int, int], list[Arguments]]) -> Case:
        version = torch.__version__ if name.startswith("sdpa") else flashgen.__version__
        return Case(name=name, version=version, call=call, arguments=arguments, workload=STEP)

    heads_first = [one.transpose(1, 2) for one in (q, *contiguous)]
    new = case("flashgen-decode/new-batch", paged, new_batches())
    return [
        case("flashgen-decode/contiguous", lambda q, k, v: decode(q, k, v, lens), same(q, *contiguous)),
        case("flashgen-decode/paged", paged, same(q, table, lens)),
        replace(new, most_calls=MOST_NEW_SEQLENS),
        case("sdpa/decode", partial(_sdpa, enable_gqa=True), same(*heads_first)),
    ]


def new_batches() -> Callable[[int, int], list[Arguments]]:
    """Queries, tables and lengths; every call of every loop has other sizes (while there are any left)."""
    q, table, lens = _step(FIRST_BATCH + BATCHES, FIRST_COLUMNS + COLUMNS)
    sizes = [
        (FIRST_BATCH + 37 * n % BATCHES, columns)
        for columns, n in itertools.product(range(FIRST_COLUMNS, FIRST_COLUMNS + COLUMNS), range(BATCHES))
    ]

    def arguments(loop: int, calls: int) -> list[Arguments]:
        chosen = [sizes[(loop * calls + n) % len(sizes)] for n in range(calls)]
        return [(q[:batch], table[:batch, :columns], lens[:batch]) for batch, columns in chosen]

    return arguments


_sdpa = torch.nn.functional.scaled_dot_product_attention


def _paged(pool: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> object:
    return flashgen.attention_decode(q, *pool, lens, block_table=table)


def _pages() -> tuple[torch.Tensor, torch.Tensor]:
    page_size = STEP.page_size or 1
    shape = (STEP.batch * STEP.seqlen_k // page_size, page_size, STEP.nheads_k, STEP.head_dim)
    k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=_device()) for _ in range(2))
    return k, v


def _step(batch: int, columns: int) -> Arguments:
    """Queries, a table whose sequences share pages, and lengths."""
    q = torch.zeros(batch, 1, STEP.nheads, STEP.head_dim, dtype=torch.bfloat16, device=_device())
    table = torch.zeros(batch, columns, dtype=torch.int32, device=_device())
    return q, table, torch.full((batch,), LENGTH, dtype=torch.int32, device=_device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
