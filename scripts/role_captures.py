"""Whether kernels hand values to their roles where a warp may still read something else.

`warp_specialize` writes what roles capture to shared memory, and the scratch memory of a reduction before it may be the
same. Triton (3.6 to 3.9) sees to no barrier between: a warp that is ahead then overwrites a sum that another has yet to
read. Kernels of packed sequences counted their tiles wrong this way, now and then, and computed some twice and others
never.
"""

from __future__ import annotations

import re

ROLES_BEGIN = re.compile(r"barrier\.sync\s+1\s*;")
"""All warps of a CTA meet at barrier 1: roles read what they capture behind it."""

_BARRIER = re.compile(r"\bbar(rier)?\.sync\b")
_ACCESS = re.compile(r"\b(?P<what>ld|st)\.shared\S*\s+(.*?)\[\s*(?P<place>[^\]]*?)\s*\]")


def overwritten(ptx: str) -> list[str]:
    """The places in shared memory, as PTX names them, that a warp may write for roles before another has read them.

    A place that is a register may be any.

    Args:
        ptx: the text of a kernel; without roles nothing is found.
    """
    before, *roles = ROLES_BEGIN.split(ptx, maxsplit=1)
    if not roles:
        return []
    lines = before.splitlines()
    last = max((number for number, line in enumerate(lines) if _BARRIER.search(line)), default=-1)
    read, found = set[str](), []
    for line in lines[last + 1 :]:
        access = _ACCESS.search(line)
        if access is None:
            continue
        place = access["place"]
        if access["what"] == "ld":
            read.add(place)
        elif read and (place in read or any(one.startswith("%") for one in (place, *read))):
            found.append(place)
    return found
