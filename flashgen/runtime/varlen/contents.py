"""What the lengths of packed sequences hold, for `FLASHGEN_CHECKS=1`: the only look at data, and it waits for it.

Without it an end behind the last row counts as the last row, and one before the end before it as that one.
"""

from __future__ import annotations

import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features


def check_contents(q: torch.Tensor, k: torch.Tensor, features: Features) -> None:
    """Refuse lengths that lead out of the tensors; nothing is checked while a CUDA graph is captured.

    Args:
        q: queries, (total_q, nheads, head_dim).
        k: keys, (total_k, nheads_k, head_dim).
        features: of a call whose shapes are right.

    Raises:
        WorkloadError: there is one; the message has the first sequence with it.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    queries, keys = features.max_seqlens
    _check_side("q", len(q), features.cu_seqlens_q, features.seqused_q, queries)
    _check_side("k", len(k), features.cu_seqlens_k, features.seqused_k, keys)


def _check_side(side: str, rows: int, ends: torch.Tensor | None, used: torch.Tensor | None, most: int) -> None:
    assert ends is not None
    places = ends.long()
    first, last = int(places[0]), int(places[-1])
    if first != 0 or last > rows:
        raise WorkloadError(
            f"cu_seqlens_{side} begins with 0 and ends at most at the {rows} rows of {side}, got {first} and {last}"
        )
    lengths = places.diff()
    _refuse(lengths < 0, f"cu_seqlens_{side} never falls: a length is at least 0", lengths)
    _refuse(lengths > most, f"no sequence is longer than max_seqlen_{side}, {most}", lengths)
    if used is not None:
        counts = used.long()
        _refuse((counts < 0) | (counts > lengths), f"seqused_{side} is 0 to the length of its sequence", counts)


def _refuse(wrong: torch.Tensor, rule: str, values: torch.Tensor) -> None:
    if bool(wrong.any()):
        b = int(wrong.int().argmax())
        raise WorkloadError(f"{rule}; got {int(values[b])} for sequence {b}")
