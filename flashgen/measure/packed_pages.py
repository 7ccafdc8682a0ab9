"""Keys and values of packed sequences in pages: scattered in one pool of all copies, with poison wherever nobody looks.

Copies of a call are tables over one pool, as the batches of an engine are: a launch after the other finds no page of
its own in the L2 cache, and neighbours in a sequence are no neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashgen.core.workload import Workload
from flashgen.measure.decode_inputs import SPARE_PAGES, STALE
from flashgen.measure.inputs import Inputs
from flashgen.measure.packed_inputs import PackedForm


def in_pages(workload: Workload, form: PackedForm, inputs: Inputs, seed: int) -> Inputs:
    """The same inputs with keys and values in pages of the workload's size, in the order that the seed says.

    Keys that no query sees are NaN in the pool, and the pages that hold no other keys are stale entries of the tables:
    behind a length, before a window, of a sequence without queries. With `form.used_k`, lengths are told by
    `seqused_k`, else by `cu_seqlens_k`.

    Args:
        workload: packed sequences with a page size.
        form: of the inputs.
        inputs: with keys side by side, k (1, nheads_k, total_k, head_dim) and v likewise.
        seed: of the order of pages.
    """
    page = workload.page_size or 1
    visible = [_Visible.of(workload, rows, keys) for _, rows, keys in form.sequences()]
    used = sum(len(each.pages(page)) for each in visible)
    count = inputs.copies * used + SPARE_PAGES
    # what stale entries come to, the first page and the last one, is poison as well
    order = 1 + torch.randperm(count - 2, generator=torch.Generator().manual_seed(seed))
    device, shape = inputs.q[0].device, (count, page)
    pools = [_pool(tensor, *shape, form.layout) for tensor in (inputs.k[0], inputs.v[0])]
    features = []
    for copy, given in enumerate(inputs.features):
        table = _table(workload, visible, order[copy * used : (copy + 1) * used])
        rows, pages, slots = (index.to(device) for index in _places(visible, table, page))
        for pool, dense in zip(pools, (inputs.k[copy], inputs.v[copy]), strict=True):
            pool[pages, :, slots] = dense[0][:, rows].transpose(0, 1)
        ends = given.cu_seqlens_q if form.used_k else given.cu_seqlens_k
        features.append(replace(given, cu_seqlens_k=ends, block_table=table.to(device)))
    k, v = ((pool,) * inputs.copies for pool in pools)
    return replace(inputs, k=k, v=v, features=tuple(features))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visible:
    """Of one sequence the keys that a query sees, `first` to `end` of its own, and the row where its keys begin."""

    row: int
    first: int
    end: int

    @classmethod
    def of(cls, workload: Workload, rows: slice, keys: slice) -> _Visible:
        queries, length = rows.stop - rows.start, keys.stop - keys.start
        left = workload.window_left
        before = 0 if left is None else max(length - queries - left, 0)
        return cls(row=keys.start, first=before if queries else length, end=length)

    def pages(self, page: int) -> range:
        """The entries of a table with such keys."""
        return range(self.first // page, -(-self.end // page)) if self.first < self.end else range(0)


def _pool(dense: torch.Tensor, pages: int, page: int, layout: str) -> torch.Tensor:
    """NaN in pages (pages, nheads_k, page_size, head_dim) with slots before heads in memory, or heads before slots."""
    heads, width = dense.shape[1], dense.shape[3]
    is_nhd = layout == "bshd"
    shape = (pages, page, heads, width) if is_nhd else (pages, heads, page, width)
    pool = torch.full(shape, float("nan"), dtype=dense.dtype, device=dense.device)
    return pool.transpose(1, 2) if is_nhd else pool


def _table(workload: Workload, visible: list[_Visible], ids: torch.Tensor) -> torch.Tensor:
    """(batch, pages of a sequence) with rows farther apart than they are long, stale wherever no page is needed."""
    page = workload.page_size or 1
    columns = max(1, -(-workload.seqlen_k // page))
    size = len(visible) * (columns + 1)
    whole = torch.tensor(STALE).repeat(size // len(STALE) + 1)[:size].view(-1, columns + 1).to(torch.int32)
    taken = iter(ids.tolist())
    for b, each in enumerate(visible):
        for entry in each.pages(page):
            whole[b, entry] = next(taken)
    return whole[:, :columns]


def _places(visible: list[_Visible], table: torch.Tensor, page: int) -> Iterator[torch.Tensor]:
    """Of every key that is seen its row among all keys, its page, and its slot there."""
    keys = [torch.arange(each.first, each.end) for each in visible]
    yield torch.cat([each.row + own for each, own in zip(visible, keys, strict=True)])
    yield torch.cat([table[b, own // page].long() for b, own in enumerate(keys)])
    yield torch.cat(keys) % page
