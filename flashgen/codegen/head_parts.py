"""How a head dimension lies in tiles, whose sides are powers of two: as one padded part, or as two with less of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.core.config import Config
from flashgen.core.workload import Specialization

LEAST_BLOCK = 16
"""The least depth that tensor cores multiply."""

HALVED_FROM = 512
"""Powers of two from here on may be cut in halves: one tile of them is more than a warpgroup multiplies at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPart:
    """Columns `start` to `start + size` of a head, in a tile of `block` columns; `suffix` is "" for the only part."""

    suffix: str
    start: int
    size: int
    block: int

    @property
    def descriptor_suffix(self) -> str:
        """What distinguishes the tensor descriptor of this part in the launch vocabulary: `q_desc`, `q1_desc`."""
        return "1" if self.start else ""


@functools.cache  # a search asks for every config that it enumerates
def head_parts(head_dim: int, split: bool) -> tuple[HeadPart, ...]:
    """The parts of a head of `head_dim` columns; with `split` two where that makes a difference.

    The first of two is the largest power of two below `head_dim`: 192 = 128 + 64, 80 = 64 + 16, 512 = 256 + 256.
    """
    if not (split and can_split(head_dim)):
        return (HeadPart(suffix="", start=0, size=head_dim, block=tile_side(head_dim)),)
    first = tile_side(head_dim) // 2
    rest = head_dim - first
    return (
        HeadPart(suffix="0", start=0, size=first, block=first),
        HeadPart(suffix="1", start=first, size=rest, block=tile_side(rest)),
    )


def part_names(name: str, parts: tuple[HeadPart, ...]) -> list[str]:
    """What a kernel calls the parts of a tensor."""
    return [f"{name}{part.suffix}" for part in parts]


@functools.cache
def can_split(head_dim: int) -> bool:
    """Whether two parts differ from one: they need less padding, or halve what one tile can hardly hold."""
    whole = tile_side(head_dim)
    if whole == head_dim:
        return head_dim >= HALVED_FROM
    return whole // 2 >= LEAST_BLOCK and whole // 2 + tile_side(head_dim - whole // 2) < whole


def is_split(config: Config) -> bool:
    """Whether heads lie in two parts; a config that is older than the knob means that they do not."""
    return bool(config.get("split_d", False))


def why_not_split(spec: Specialization) -> str | None:
    """Why neither the heads of Q and K nor those of V have a use for two parts, or None."""
    if can_split(spec.head_dim) or can_split(spec.head_dim_v):
        return None
    return f"heads of {spec.head_dim} and {spec.head_dim_v} columns are no smaller in two parts"


@functools.cache
def padded(head_dim: int, split: bool) -> int:
    """Columns of all parts together."""
    return columns_of(head_parts(head_dim, split))


def columns_of(parts: tuple[HeadPart, ...]) -> int:
    """Columns of these parts together."""
    return sum(part.block for part in parts)


def power_of_two(size: int) -> int:
    """The least power of two from `size` on, at least 1."""
    return 1 << max(0, size - 1).bit_length()


@functools.cache  # the rules of a decode family ask each of a search space's thousands of configs
def tile_side(size: int) -> int:
    """The side of a tile that holds `size` columns and that tensor cores multiply."""
    return max(LEAST_BLOCK, power_of_two(size))
