"""What launches of a `DriverPlan` write: scales, query offsets, streams and counters, scratch memory, pointers.

Each is made once for a plan, and from that once for a geometry; what it returns writes the words of one launch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.launch.driver_plan import Call, DriverPlan, SizedPlan
from flashgen.launch.feature_arguments import LOG2E
from flashgen.launch.geometry import offset_range
from flashgen.launch.parameters import WORD_BYTES, WORD_FORMATS
from flashgen.launch.plan_layout import SCALES, PlanLayout
from flashgen.launch.vocabulary import OFFSET_TENSOR

Offset = int | torch.Tensor | None

FAILED = 1 << 32
"""What a launch of several kernels gives is the number of the kernel that was refused times this, and its code."""


def runner(launch_kernel: Callable[..., int], calls: Sequence[Call]) -> Callable[..., int]:
    """What launches several kernels in order until one is refused."""

    def run(*first: object) -> int:
        for call in calls:
            code = launch_kernel(*call)
            if code:
                return calls.index(call) * FAILED + code
        return 0

    return run


def scales_writer(layout: PlanLayout) -> Callable[[Any, float], None]:
    """What writes a softmax scale in its two forms, which lie side by side."""
    pack = struct.Struct("<" + WORD_FORMATS["fp32"] * len(SCALES)).pack_into
    first = WORD_BYTES * layout.places[SCALES[0]]

    def write_scales(words: Any, scale: float) -> None:
        pack(words, first, scale, scale * LOG2E)

    return write_scales


def stream_setter(
    plan: DriverPlan,
) -> tuple[Callable[[Any, int, bool], list[torch.Tensor]], Callable[[], bool] | None]:
    """What points all kernels to a stream and to their counters on it, and what says whether a graph is captured.

    The first is told whether one is, and returns the counters, to be kept until the kernels are launched. They are
    others in each capture, so that is asked before every launch of a plan that has any; the second is None for a plan
    that has none.
    """
    streams, point_counters = plan.streams, plan.point_counters if plan.counters else None

    def set_stream(words: Any, stream: int, is_captured: bool) -> list[torch.Tensor]:
        for word in streams:
            words[word] = stream
        held = [] if point_counters is None else point_counters(words, stream)
        if not is_captured:
            plan.begin_on(stream, words)
        return held

    return set_stream, torch.cuda.is_current_stream_capturing if plan.counters else None


def scratch_maker(plan: DriverPlan, sized: SizedPlan) -> Callable[[torch.Tensor], torch.Tensor]:
    """Allocates scratch memory beside a tensor and points parameters to its pieces, one by one."""
    scratch, memory, words = sized.scratch, sized.memory, sized.memory.words
    pieces = [
        (plan.describer(name), plan.layout.places[piece.pointer], piece.offset_bytes)
        for name, piece in scratch.pieces.items()
    ]

    def new_scratch(beside: torch.Tensor) -> torch.Tensor:
        found = scratch.allocate(beside)
        start = found.data_ptr()
        for describe, word, offset in pieces:
            if describe is not None:
                describe(memory, start + offset)
            words[word] = start + offset
        return found

    return new_scratch


OffsetOf = Callable[[Offset, int, int], int]
"""The value of a query offset that a call with so many queries and keys names, where nothing changes beyond it.

It raises LaunchError for the other kind than what is compiled in.
"""


def offset_writer(plan: DriverPlan) -> tuple[OffsetOf, Callable[[Any, int | None], None]]:
    """What reads the query offset of a call, and what writes it; the second raises LaunchError for a missing tensor."""
    binding = plan.binding
    check, is_tensor, is_far = binding.check_offset, binding.spec.offset_tensor, binding.is_far
    word = plan.layout.places[OFFSET_TENSOR if is_tensor else "q_offset"]

    def address(q_offset: Offset, rows: int = 0, keys: int = 0) -> int:
        if not isinstance(q_offset, torch.Tensor):
            check(q_offset)
        return q_offset.data_ptr()  # type: ignore[union-attr]

    def clamped(q_offset: Offset, rows: int, keys: int) -> int:
        if isinstance(q_offset, torch.Tensor):
            check(q_offset)
        low, high = offset_range(rows, keys, is_far=is_far)
        return max(low, min(q_offset, high))  # type: ignore[return-value, type-var]

    def write(words: Any, offset: int | None) -> None:
        words[word] = address(None) if offset is None else offset

    return address if is_tensor else clamped, write


def pointers_writer(plan: DriverPlan) -> Callable[[SizedPlan], Callable[[tuple[int, ...]], None]]:
    """What makes every parameter point to the memory of a call: scratch memory, and tensors in their direction's order.

    An absent tensor is 0.
    """
    tensors, places = plan.binding.direction.tensors, plan.layout.places
    optional = [(number, places[one.rows]) for number, one in enumerate(tensors, start=1) if one.rows]
    write_all = struct.Struct(f"<{1 + len(tensors) + len(plan.binding.scratch.pieces)}Q").pack_into
    numbers = {tensor.name: number for number, tensor in enumerate(tensors, start=1)}
    maps = plan.layout.map_places
    entries = [
        (numbers.get(name, 0), name, maps[number].at, entry)
        for name, found in plan.entries.items()
        for number, entry in found
    ]
    entries = [one for one in entries if one[0] or one[1] in plan.binding.scratch.pieces]

    def at_sizes(sized: SizedPlan) -> Callable[[tuple[int, ...]], None]:
        pieces, memory, rows = sized.scratch.pieces, sized.memory, sized.geometry.q_shape[2]
        offsets, words = [piece.offset_bytes for piece in pieces.values()], memory.words
        described = [
            (number, 0 if number else pieces[name].offset_bytes, address_at, entry)
            for number, name, address_at, entry in entries
        ]

        def write(pointers: tuple[int, ...]) -> None:
            scratch = pointers[0]
            write_all(words, 0, *pointers, *[scratch + offset for offset in offsets])
            for number, word in optional:
                words[word] = rows if pointers[number] else 0
            for number, offset, address_at, entry in described:
                words[entry] = address_at(memory, pointers[number] + offset)

        return write

    return at_sizes
