"""What the lengths of packed sequences hold, for `FLASHGEN_CHECKS=1`: the only look at data, and it waits for it.

Without it an end behind the last row counts as the last row, and one before the end before it as that one; more keys
than a block table has pages for count as just as many, and a page id below 0 as page 0.
"""

from __future__ import annotations

import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features
from flashgen.runtime.ops.contents import refuse, refuse_pages


def check_contents(q: torch.Tensor, k: torch.Tensor, features: Features, num_decodes: int = 0) -> None:
    """Refuse lengths that lead out of the tensors; nothing is checked while a CUDA graph is captured.

    Args:
        q: queries, (total_q, nheads, head_dim).
        k: keys, (total_k, nheads_k, head_dim), or pages of them.
        features: of a call whose shapes are right.
        num_decodes: how many sequences have one query, from the first on.

    Raises:
        WorkloadError: there is one; the message has the first sequence with it.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    queries, keys = features.max_seqlens
    _check_side("q", len(q), features.cu_seqlens_q, features.seqused_q, queries)
    if features.block_table is None:
        _check_side("k", len(k), features.cu_seqlens_k, features.seqused_k, keys)
    else:
        _check_pages(k, features, features.block_table)
    if num_decodes:
        assert features.cu_seqlens_q is not None
        lengths = features.cu_seqlens_q.long().diff()[:num_decodes]
        refuse(lengths != 1, f"the first num_decodes sequences, {num_decodes}, have one query each", lengths)


def _check_pages(k: torch.Tensor, features: Features, table: torch.Tensor) -> None:
    """Lengths of keys in pages, and the page ids of those that a query may see."""
    pages, page_size = k.shape[:2]
    queries, keys = features.cu_seqlens_q, features.seqused_k
    assert queries is not None
    if keys is None:
        assert features.cu_seqlens_k is not None
        keys = features.cu_seqlens_k.long().diff()
    lengths, room = keys.long(), table.shape[1] * page_size
    most = min(room, features.max_seqlens[1])
    rule = f"keys of a sequence are 0 to {most}, by max_seqlen_k and as the block_table has room for {room}"
    refuse((lengths < 0) | (lengths > most), rule, lengths)
    rows = queries.long().diff() if features.seqused_q is None else features.seqused_q.long()
    left = features.window[0]
    first = torch.zeros_like(lengths) if left is None else (lengths - rows - left).clamp(min=0)
    place = torch.arange(table.shape[1], device=table.device) * page_size
    used = (place < lengths[:, None]) & (place + page_size > first[:, None]) & (rows > 0)[:, None]
    refuse_pages(used, table, pages, "keys that are visible")


def _check_side(side: str, rows: int, ends: torch.Tensor | None, used: torch.Tensor | None, most: int) -> None:
    assert ends is not None
    places = ends.long()
    first, last = int(places[0]), int(places[-1])
    if first != 0 or last > rows:
        raise WorkloadError(
            f"cu_seqlens_{side} begins with 0 and ends at most at the {rows} rows of {side}, got {first} and {last}"
        )
    lengths = places.diff()
    refuse(lengths < 0, f"cu_seqlens_{side} never falls: a length is at least 0", lengths)
    refuse(lengths > most, f"no sequence is longer than max_seqlen_{side}, {most}", lengths)
    if used is not None:
        counts = used.long()
        refuse((counts < 0) | (counts > lengths), f"seqused_{side} is 0 to the length of its sequence", counts)
