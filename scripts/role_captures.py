"""Whether kernels hand values to their roles where a warp may still read something else.

`warp_specialize` writes what roles capture to shared memory, and the scratch memory of a reduction before it may be the
same. Triton (3.6 to 3.9) sees to no barrier between: a warp that is ahead then overwrites a sum that another has yet to
read. Kernels of packed sequences counted their tiles wrong this way, now and then, and computed some twice and others
never.
"""

from __future__ import annotations

import re

from scripts.ptx_flow import Facts, visit

ROLES_BEGIN = re.compile(r"barrier\.sync\s+1\s*;")
"""All warps of a CTA meet at barrier 1: roles read what they capture behind it."""

_BARRIER = re.compile(r"\bbar(rier)?\.sync\b")
_ACCESS = re.compile(r"\b(?P<what>ld|st)(\.shared|matrix)\S*\s+(.*?)\[\s*(?P<place>[^\]]*?)\s*\]")


def overwritten(ptx: str) -> list[str]:
    """The places in shared memory, as PTX names them, that a warp may write for roles before another has read them.

    A place that is a register may be any.

    Args:
        ptx: the text of a kernel; without roles nothing is found.
    """
    found = set[str]()

    def step(facts: Facts, line: str) -> Facts:
        if ROLES_BEGIN.search(line):
            found.update(place for what, place in facts if what == "overwritten")
            return _ENDED
        if facts == _ENDED or _BARRIER.search(line):
            return facts & _ENDED
        access = _ACCESS.search(line)
        if access is None:
            return facts
        place = access["place"]
        if access["what"] == "ld":
            return facts | {("read", place)}
        read = {other for what, other in facts if what == "read"}
        may_be_one = place in read or any(one.startswith("%") for one in (place, *read))
        return facts | {("overwritten", place)} if read and may_be_one else facts

    visit(ptx, step)
    return sorted(found)


_ENDED: Facts = frozenset({("roles", "")})
"""Behind the first meeting: what follows are the roles."""
