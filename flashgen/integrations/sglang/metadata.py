"""What a batch of SGLang's is for flashgen: lengths and a table of pages on the GPU, and bounds that the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashgenMetadata:
    """One batch, the same for all layers.

    Attributes:
        seq_lens: keys of each request, those of its queries among them, int32 (requests,).
        table: pages of each request, int32 (requests, pages).
        query_starts: of prompts, int32 (requests + 1,); None for steps of decoding.
        max_query_len: bound of the queries of a request.
    """

    seq_lens: Tensor
    table: Tensor
    query_starts: Tensor | None = None
    max_query_len: int = 1


class Tables:
    """Makes tables of pages from SGLang's table of slots, and keeps those that CUDA graphs have captured."""

    def __init__(self, slots: Tensor, page_size: int, context_len: int) -> None:
        """Know the table of slots, `req_to_token` (requests, tokens)."""
        self._slots, self._page = slots, page_size
        self._columns = -(-context_len // page_size)
        self._graph_table = self._graph_lens = slots.new_empty(0, dtype=torch.int32)

    def of(self, requests: Tensor, seq_lens: Tensor, lengths: Any) -> FlashgenMetadata:
        """The metadata of steps that run now; no length is read from the GPU.

        Args:
            requests: their rows in the table of slots, (requests,).
            seq_lens: keys of each.
            lengths: the same on the host, or None where SGLang does not have them there.
        """
        columns = self._needed(lengths)
        return FlashgenMetadata(seq_lens=seq_lens.to(torch.int32), table=self._pages(requests, columns))

    def keep(self, most: int) -> None:
        """Make the tensors that graphs of up to so many requests read."""
        self._graph_table = self._slots.new_zeros((most, self._columns), dtype=torch.int32)
        self._graph_lens = self._slots.new_ones((most,), dtype=torch.int32)

    def kept(self, requests: Tensor, seq_lens: Tensor, lengths: Any = None) -> FlashgenMetadata:
        """Fill these tensors; what a graph captured of them is what its replay reads."""
        columns, count = self._needed(lengths), len(requests)
        self._graph_table[:count, :columns].copy_(self._pages(requests, columns))
        self._graph_lens[:count].copy_(seq_lens[:count])
        return FlashgenMetadata(seq_lens=self._graph_lens[:count], table=self._graph_table[:count])

    def _needed(self, lengths: Any) -> int:
        """Columns that the longest request needs."""
        if lengths is None or not len(lengths):
            return self._columns
        return min(self._columns, max(1, -(-longest(lengths) // self._page)))

    def _pages(self, requests: Tensor, columns: int) -> Tensor:
        first = self._slots[:, : columns * self._page : self._page]
        return (first[requests] // self._page).to(torch.int32)


def longest(lengths: Tensor | Sequence[int]) -> int:
    """The greatest of some lengths on the host."""
    return int(max(lengths.tolist() if isinstance(lengths, Tensor) else lengths))
