"""How many programs a pair of sequence and key head gets where a launch has one for each split."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.core.config import Config
from flashgen.core.device import Device

MOST_IN_TURN = 4
"""Splits of fixed size that a program takes one after the other, where a sequence may have many: of a ragged batch all
others wait for the longest one."""

MOST_PROGRAMS = 64
"""Times as many programs as run at a time; those of short sequences have nothing to do, and end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """Splits of a pair, as far as a host knows them.

    Attributes:
        least: into which sequences are cut, if their tiles are enough.
        most: programs that a launch has for each pair.
        slots: partial results that a pair may have.
    """

    least: int
    most: int
    slots: int


def split_counts(
    config: Config, device: Device, *, pairs: int, seqlen_k: int, split_size: int, is_batch: bool = False
) -> SplitCounts:
    """The counts of a launch.

    Args:
        config: of schedule `grid`.
        device: what it runs on.
        pairs: of sequence, key head and block of query rows.
        seqlen_k: keys that a sequence has at most.
        split_size: keys of a split where bits depend on nothing else; 0 lets the config choose.
        is_batch: whether there are several sequences, which may have different lengths.
    """
    programs = device.num_sms * config.integer("per_sm")
    if split_size:
        slots = -(-seqlen_k // split_size)
        most = _even(slots, pairs, programs)
        if is_batch:
            most = max(most, min(-(-slots // MOST_IN_TURN), MOST_PROGRAMS * programs // pairs))
        return SplitCounts(least=1, most=most, slots=slots)
    worth = max(-(-seqlen_k // (config.integer("block_n") * config.integer("min_tiles"))), 1)
    least, chunk = min(max(programs // pairs, 1), worth), config.integer("chunk")
    most = min(max(least, -(-seqlen_k // chunk)), worth) if chunk else least
    return SplitCounts(least=least, most=most, slots=most)


def _even(slots: int, pairs: int, programs: int) -> int:
    """The programs of each pair that are done first where so many of a launch run at a time, each as long as a split.

    About as many as run at a time, or twice that: each takes its splits one after the other.
    """
    fills = max(programs // pairs, 1)

    def rounds(most: int) -> int:
        return -(-pairs * most // programs) * -(-slots // most)

    return min((min(slots, each) for each in (fills, fills + 1, 2 * fills)), key=lambda most: (rounds(most), most))
