"""Whether one thread acts for all warps of its role before they are ready, or TMA reads what it cannot see yet.

One thread arrives at an mbarrier, and one has TMA store a tile: for the other warps of a warpgroup, too. These must
have met since they read or wrote shared memory, or since they waited for products that read it; and what they wrote
must be shown to the asynchronous proxy, of which TMA is part. The wait for a store of TMA is that of the thread which
began it: the others write to the same place, or hand it on, once they have met. Triton sees to the meetings, and
templates to the fences and to what they tell each other by named barriers, which Triton does not know.
"""

from __future__ import annotations

import re

from scripts.ptx_flow import Facts, visit
from scripts.role_captures import ROLES_BEGIN

_MEETING = re.compile(r"\b(bar|barrier|bar\.warp)\.sync\b")
_FENCE = re.compile(r"\bfence\.proxy\.async\b")
_LOAD = re.compile(r"\b(ld\.shared|ldmatrix)\b")
_STORE = re.compile(r"\b(st\.shared|stmatrix)\b")
_PRODUCTS = re.compile(r"\bwgmma\.wait_group\b")
_STORED = re.compile(r"\bcp\.async\.bulk\.wait_group\.read\b")
_ARRIVAL = re.compile(r"\bmbarrier\.arrive\.shared\b")
_HAND_OVER = re.compile(r"\bbar(rier)?\.arrive\b")
_REDUCE = re.compile(r"\bcp\.reduce\.async\.bulk\b")
_SHOWN = re.compile(r"\bbar(rier)?\.arrive\b|\bwgmma\.mma_async\b")
_TMA_STORE = re.compile(r"\bcp\.(reduce\.)?async\.bulk\.\S*global\.shared\b")

_SINCE_MEETING = frozenset({"load", "store", "wait for products", "wait for TMA"})
"""What happened since the warps of a role met; "unseen" is what they wrote since a fence."""


def hasty(ptx: str) -> list[str]:
    """What one thread does too early, and for the sake of what, as two lines of PTX.

    Args:
        ptx: the text of a kernel; without roles nothing is found.
    """
    found = set[str]()
    if not ROLES_BEGIN.search(ptx):
        return []
    # where TMA adds tiles up, warpgroups write nothing else than these between a hand-over and the next, and what all
    # of their products read; elsewhere they write what threads alone read, too
    shows = _REDUCE.search(ptx) is not None

    def step(facts: Facts, line: str) -> Facts:
        early = _early(line) | ({"unseen"} if shows and _SHOWN.search(line) else set())
        found.update(f"{line} <- {kind}: {other}" for kind, other in facts if kind in early)
        if ROLES_BEGIN.search(line):  # other warps, or other roles of the same
            return frozenset()
        if _MEETING.search(line):
            return frozenset(fact for fact in facts if fact[0] not in _SINCE_MEETING)
        if _FENCE.search(line):
            return frozenset(fact for fact in facts if fact[0] != "unseen")
        return facts | {(kind, line) for kind in _kinds(line)}

    visit(ptx, step)
    return sorted(found)


def _early(line: str) -> frozenset[str]:
    """What may not lie between the last meeting, or fence, and a line."""
    if _ARRIVAL.search(line):
        return _SINCE_MEETING
    if _TMA_STORE.search(line):
        return frozenset({"store", "unseen"})
    if _STORE.search(line) or _HAND_OVER.search(line):
        return frozenset({"wait for TMA"})
    return frozenset()


def _kinds(line: str) -> list[str]:
    if _LOAD.search(line):
        return ["load"]
    if _STORE.search(line):
        return ["store", "unseen"]
    if _PRODUCTS.search(line):
        return ["wait for products"]
    return ["wait for TMA"] if _STORED.search(line) else []
