"""`Compiled`: what the kernels of a config take of an SM, from a compile or, before one, from an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a kernel takes of an SM; registers and spills (bytes) are per thread, the rest per program."""

    registers: int
    spills: int
    shared_bytes: int
    occupancy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled(Taken):
    """What a candidate takes: of each figure the worst of its kernels, and `parts` for each of several, by entry."""

    compile_ms: float = 0.0
    source_digest: str = ""
    parts: tuple[tuple[str, Taken], ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, Taken], *, compile_ms: float = 0.0, source_digest: str = "") -> Compiled:
        """The sum of kernels by entry."""
        taken = parts.values()
        return cls(
            registers=max(part.registers for part in taken),
            spills=max(part.spills for part in taken),
            shared_bytes=max(part.shared_bytes for part in taken),
            occupancy=min(part.occupancy for part in taken),
            compile_ms=compile_ms,
            source_digest=source_digest,
            parts=tuple(parts.items()),
        )

    def part(self, entry: str) -> Taken:
        """What the kernel of this entry takes; where the kernels are not told apart, what the worst one does."""
        return dict(self.parts).get(entry, self)
