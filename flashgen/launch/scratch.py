"""`ScratchPlan`: the memory that the kernels of one call share, as one allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from flashgen.codegen.families import family
from flashgen.codegen.family import Scratch, Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import LaunchError
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch.dtypes import TORCH_DTYPES

PIECE_ALIGNMENT_BYTES = 256
"""Every piece begins at a multiple of this: what vector loads, TMA and whole cache lines ask for."""


class Piece(NamedTuple):
    """One piece of scratch memory: its first byte, counted from the start of the allocation, and what lies there."""

    scratch: Scratch
    offset_bytes: int

    @property
    def pointer(self) -> str:
        """The parameter that points to it: `DqAcc` to `dq_acc`."""
        return "".join(word.capitalize() for word in self.scratch.name.split("_"))

    def view(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides in elements for a descriptor of `rank` axes, the first of which holds all that go before.

        Nothing lies between the rows of a piece, so (batch, nheads, rows) is (batch * nheads * rows,) as well.
        """
        shape = self.scratch.shape
        merged = len(shape) - rank + 1
        if merged > 1:
            shape = (math.prod(shape[:merged]), *shape[merged:])
        strides, step = [1], 1
        for size in shape[:0:-1]:
            step *= size
            strides.append(step)
        return shape, tuple(strides[::-1])

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """This piece of an allocation, as a tensor."""
        scratch, start = self.scratch, self.offset_bytes
        size_bytes = math.prod(scratch.shape) * DTYPE_BYTES[scratch.dtype]
        raw = memory.view(torch.uint8)[start : start + size_bytes]
        return raw.view(TORCH_DTYPES[scratch.dtype]).view(scratch.shape)


class ScratchPlan(NamedTuple):
    """All pieces of a call side by side; none for kernels that share nothing.

    Attributes:
        pieces: by name, in the order of memory.
        floats: 32-bit elements of the allocation.
        sizes: what the pieces are for.
    """

    pieces: dict[str, Piece]
    floats: int
    sizes: Sizes

    @classmethod
    def at(cls, spec: Specialization, config: Config, sizes: Sizes, device: Device, *, first: str = "") -> ScratchPlan:
        """The same as `of` for a launch on a device, which says how many CTAs share the keys of a tile of queries.

        Raises:
            LaunchError: the family names a piece twice.
        """
        return cls.maker(spec, config, device, first=first)(sizes)

    @classmethod
    def maker(
        cls, spec: Specialization, config: Config, device: Device, *, first: str = ""
    ) -> Callable[[Sizes], ScratchPlan]:
        """The same for many sizes; what it returns raises as `at` does."""
        row = family(config.family)
        key_splits, scratch = row.key_splits, row.scratch

        def at(sizes: Sizes) -> ScratchPlan:
            splits = key_splits(spec, config, sizes, device)
            if splits != 1:
                sizes = sizes._replace(key_splits=splits)
            asked = scratch(spec, config, sizes)
            return cls._laid_out(asked, config, sizes, first) if asked else cls({}, 0, sizes)

        return at

    @classmethod
    def of(cls, spec: Specialization, config: Config, sizes: Sizes, *, first: str = "") -> ScratchPlan:
        """Lay out what the config's family asks for.

        Args:
            spec: what is compiled in.
            config: its config.
            sizes: those of the call.
            first: the piece that lies at the start of the allocation, if the family asks for it.

        Raises:
            LaunchError: the family names a piece twice.
        """
        return cls._laid_out(family(config.family).scratch(spec, config, sizes), config, sizes, first)

    @classmethod
    def _laid_out(cls, asked: Sequence[Scratch], config: Config, sizes: Sizes, first: str) -> ScratchPlan:
        if asked and asked[0].name != first:
            asked = sorted(asked, key=lambda one: one.name != first)
        pieces, end = dict[str, Piece](), 0
        for one in asked:
            name, shape, dtype = one
            pieces[name] = Piece(one, end)
            end += math.prod(shape) * DTYPE_BYTES[dtype]
            end += -end % PIECE_ALIGNMENT_BYTES
        if len(pieces) < len(asked):
            names = [one.name for one in asked]
            raise LaunchError(f"pieces of scratch memory have different names, got {names} of {config.family}")
        return cls(pieces, end // 4, sizes)

    def allocate(self, beside: torch.Tensor) -> torch.Tensor:
        """Memory for one call, uninitialised: fp32, on the device of `beside`, from the current stream's pool."""
        return beside.new_empty(self.floats, dtype=torch.float32)
