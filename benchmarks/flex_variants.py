"""FlexAttention at its best: kernel options, sizes of the block mask and its two backends, tried on the real inputs.

What `mode="max-autotune"` of torch.compile finds is contained: of its configs for an H200, 64x64 or 64x32 blocks in
three stages with four warps came first for every kind of workload. It times them on a stand-in for the block mask in
which no block is hidden, takes 10 to 40 s for a shape, and leaves TMA and what follows it here as the caller set them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks import fa4
from benchmarks.flex import BLOCK_SIZE, compiled_flex, flex_call, forget_compiled
from benchmarks.impls import IMPLS, Call, Impl
from flashgen.core.workload import Workload
from flashgen.measure.inputs import Inputs

FLEX = "flex"

CHOICES = ("best", "triton", "default")
"""What a benchmark may be told: every variant, those that Triton compiles, or what a user gets without options."""

NEAR = 1.1
"""Variants within this factor of the fastest one are tried again on other workloads of the class."""

NARROW = 512
"""Keys: a window up to this is a class of its own, since blocks of 128 keys hold much that it hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to call FlexAttention; `name` is what a row says of it behind torch's version.

    Attributes:
        name: empty for the default.
        options: `kernel_options` of the call.
        block_size: queries and keys of a block of the block mask.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    block_size: tuple[int, int] = BLOCK_SIZE

    @property
    def version(self) -> str:
        """The version of a row."""
        return f"{torch.__version__} {self.name}".rstrip()

    @property
    def is_triton(self) -> bool:
        """Whether Triton compiles it; the other backend is FlashAttention-4."""
        return self.options.get("BACKEND") != "FLASH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A config of the forward kernel."""

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int

    @property
    def name(self) -> str:
        """Such as `64x64 3s 4w`: block, stages, warps."""
        return f"{self.block_m}x{self.block_n} {self.num_stages}s {self.num_warps}w"

    @property
    def options(self) -> dict[str, int]:
        """For the forward kernel alone: the backward kernel has other blocks."""
        return {
            "fwd_BLOCK_M": self.block_m,
            "fwd_BLOCK_N": self.block_n,
            "fwd_num_stages": self.num_stages,
            "fwd_num_warps": self.num_warps,
        }


DEFAULT = Variant(name="")

TILES: tuple[tuple[int, tuple[Tile, ...]], ...] = (
    (
        128,
        (
            Tile(block_m=64, block_n=64, num_stages=3, num_warps=4),
            Tile(block_m=128, block_n=64, num_stages=3, num_warps=8),
        ),
    ),
    (
        256,
        (
            Tile(block_m=64, block_n=32, num_stages=3, num_warps=4),
            Tile(block_m=128, block_n=64, num_stages=2, num_warps=8),
        ),
    ),
    (
        512,
        (
            Tile(block_m=64, block_n=32, num_stages=3, num_warps=4),
            Tile(block_m=64, block_n=32, num_stages=2, num_warps=8),
        ),
    ),
)
"""By the largest head_dim: the tile that is tried first, and one that is tried where the first is near the best."""

BACKWARD_TILE = {
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_stages": 3,
    "bwd_num_warps": 4,
}
"""Of the backward kernel: smaller blocks than torch's own for a Hopper GPU up to heads of 128, so that an SM holds more
of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`first` are always tried; `finer` vary those that Triton compiles, where they are not far behind."""

    first: tuple[Variant, ...]
    finer: tuple[Variant, ...]


def plan(workload: Workload, *, flash: bool = True, has_mask_mod: bool = False) -> Plan:
    """The variants for a workload.

    Args:
        workload: what is raced.
        flash: without it only those that Triton compiles.
        has_mask_mod: whether a function of the caller hides keys, at other edges than those of blocks.
    """
    largest = max(workload.head_dim, workload.head_dim_v)
    tiles = next((tiles for limit, tiles in TILES if largest <= limit), TILES[-1][1])
    given = {"USE_TMA": True, **sound_options(workload)}
    first, *others = (Variant(name=f"TMA {tile.name}", options={**given, **tile.options}) for tile in tiles)
    finer = [*others, DEFAULT]
    if workload.specialization.window or workload.is_packed or has_mask_mod:
        finer.insert(0, Variant(name=f"{first.name} mask 64x64", options=first.options, block_size=(64, 64)))
    if workload.direction == "backward":
        finer = [Variant(name=f"{first.name} bwd 64x64", options={**first.options, **BACKWARD_TILE}), DEFAULT]
    experimental = [variant for variant in (flash_variant(workload),) if flash and variant is not None]
    return Plan(first=(*experimental, first), finer=tuple(finer))


def sound_options(workload: Workload) -> dict[str, bool]:
    """Promises about a workload that FlexAttention's documentation lets a caller make where they hold.

    Under a window a row may begin with a block that hides all its keys, and blocks that are partly hidden lie at both
    ends; so it is with documents of packed sequences. The scale can be moved into q where no function sees the scores.
    """
    options = {}
    if not (workload.specialization.window or workload.mask or workload.is_packed):
        options |= {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
    if workload.causal and workload.seqlen_q > workload.seqlen_k:
        options = {}
    if not (workload.softcap or workload.alibi or workload.bias):
        options["PRESCALE_QK"] = True
    return options


def flash_variant(workload: Workload) -> Variant | None:
    """FlexAttention over the kernels of FlashAttention-4, or None where they cannot be asked.

    With sinks they cannot: their LSE is in another base than the one that FlexAttention takes it for (torch 2.11).
    """
    if fa4.limits(workload) is not None or workload.sink:
        return None
    return Variant(name="FLASH", options={"BACKEND": "FLASH"}, block_size=_flash_blocks(workload))


def _flash_blocks(workload: Workload) -> tuple[int, int]:
    """Queries and keys of a block: its kernels for Hopper take a block mask with their own tiles only."""
    backward, dims = workload.direction == "backward", (workload.head_dim, workload.head_dim_v)
    if dims[0] <= 64:
        return (128 if backward else 192, 128)
    if dims[0] <= 128:
        return 128, 128
    if dims[0] <= 192:
        return 128, 96 if backward else (128 if dims[1] <= 128 else 112)
    return 128, 64 if backward else 80


def class_of(workload: Workload) -> Hashable:
    """Workloads of one class differ in lengths, batch and heads, and are served best by the same variants."""
    w = workload
    narrow = w.window_left is not None and w.window_left <= NARROW
    whole = w.seqlen_q % BLOCK_SIZE[0] == 0 and w.seqlen_k % BLOCK_SIZE[1] == 0
    return w.specialization, w.nheads != w.nheads_k, narrow, whole


def with_flex(impls: Sequence[Impl], choice: str, wrap: Callable[[Impl], Impl] | None = None) -> tuple[Impl, ...]:
    """`impls` with FlexAttention as one of `CHOICES` says.

    Args:
        impls: what races; FlexAttention may be missing.
        choice: `default` leaves it as it is.
        wrap: makes the implementation that races of one of a forward pass.
    """
    if choice == "default":
        return tuple(impls)
    forward = next(impl for impl in IMPLS if impl.name == FLEX)

    def wrapped(made: Impl) -> Impl:
        return made if wrap is None else wrap(made)

    def of(variant: Variant) -> Impl:
        made = replace(forward, version=lambda: variant.version, prepare=partial(_prepare, variant))
        return wrapped(made if variant.is_triton else replace(made, unsupported=why_not_flash))

    flash = choice == "best"
    unsupported = partial(_why_not, forward) if flash else forward.unsupported
    best = replace(wrapped(replace(forward, unsupported=unsupported)), variants=FlexVariants(of, flash=flash))
    return tuple(best if impl.name == FLEX else impl for impl in impls)


def why_not_flash(workload: Workload) -> str | None:
    """Why FlashAttention-4 cannot be FlexAttention's backend for a workload, or None."""
    return None if flash_variant(workload) is not None else "FlashAttention-4 cannot be its backend here"


def _why_not(forward: Impl, workload: Workload) -> str | None:
    """Why neither backend can: what Triton's kernels cannot index, the other one may."""
    return None if why_not_flash(workload) is None else forward.unsupported(workload)


def _prepare(variant: Variant, workload: Workload, inputs: Inputs) -> Call:
    options, size = variant.options, variant.block_size
    return Call(run=flex_call(compiled_flex(), workload, inputs, kernel_options=options, block_size=size))


class FlexVariants:
    """Says which variant a race tries next: on the first workload of a class all that may win, later the near ones.

    Args:
        of: makes an implementation of a variant.
        flash: whether FlashAttention-4 may be the backend.
        has_mask_mod: as for `plan`.
    """

    def __init__(self, of: Callable[[Variant], Impl], *, flash: bool = True, has_mask_mod: bool = False) -> None:
        self._of = of
        self._plan = partial(plan, flash=flash, has_mask_mod=has_mask_mod)
        self._near: dict[Hashable, tuple[Variant, ...]] = {}

    def next(self, workload: Workload, seen: Mapping[str, float]) -> Impl | None:
        """The variant to try after those that were `seen`, or None."""
        if not seen:
            forget_compiled()
        kind = class_of(workload)
        tried = self._plan(workload)
        tried = Plan(first=self._near[kind], finer=()) if kind in self._near else tried
        chosen = next((each for each in _wanted(tried, seen) if each.version not in seen), None)
        if chosen is None:
            self._near.setdefault(kind, _near(tried, seen))
        return None if chosen is None else self._of(chosen)


def _wanted(tried: Plan, seen: Mapping[str, float]) -> Iterator[Variant]:
    """What is tried, in order; the end depends on what was seen of the beginning."""
    yield from tried.first
    triton, flash = (
        min((seen.get(each.version, math.inf) for each in tried.first if each.is_triton == wanted), default=math.inf)
        for wanted in (True, False)
    )
    if triton <= NEAR * flash:
        yield from tried.finer
    if min(seen.values(), default=math.inf) == math.inf:
        yield DEFAULT


def _near(tried: Plan, seen: Mapping[str, float]) -> tuple[Variant, ...]:
    """Those that are within a factor of the fastest; if all failed, the default.

    And the first ones that have no time: at other sizes memory may last, or a queue hide what the host takes.
    """
    best = min(seen.values(), default=math.inf)
    if best == math.inf:
        return (DEFAULT,)
    untimed = tuple(each for each in tried.first if seen[each.version] == math.inf)
    return untimed + tuple(
        each for each in (*tried.first, *tried.finer) if seen.get(each.version, math.inf) <= NEAR * best
    )
