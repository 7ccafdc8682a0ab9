"""Query-key pairs that a causal mask and a window leave visible."""

from __future__ import annotations


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> int:
    """Pairs of one head and one sequence; `left` and `right` are the window's, None is unlimited, causal is right 0."""
    if not seqlen_q or not seqlen_k:
        return 0
    offset = seqlen_k - seqlen_q
    end = seqlen_q * seqlen_k
    if right is not None:
        end = _clamped_sum(seqlen_q, offset + right + 1, seqlen_k)
    start = 0
    if left is not None:
        start = _clamped_sum(seqlen_q, offset - left, seqlen_k)
    return end - start


def _clamped_sum(rows: int, start: int, limit: int) -> int:
    """Sum of min(max(i + start, 0), limit) over i in [0, rows)."""
    first = min(max(-start, 0), rows)  # rows before it add 0
    last = min(max(limit - start, first), rows)  # rows from it on add limit
    count = last - first
    return count * start + (first + last - 1) * count // 2 + (rows - last) * limit
