"""Descriptors (CUtensorMap) of tensors for TMA: one for each pointer that a plan's launches lately had at a geometry.

Tensors of a model come back to the same few places. The first descriptor is encoded; those for other pointers are
copies of it with another address, and a pointer that was seen lately costs no call of the driver at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_uint32, c_uint64
from typing import Any

from flashgen.launch import driver

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
TENSOR_MAPS_KEPT = 64
"""Descriptors of one tensor of a plan at one geometry, each for another pointer."""

L2_PROMOTION_128B = 2
TENSOR_MAP_DTYPES = {"u8": 0, "fp16": 6, "fp32": 7, "tf32": 7, "bf16": 9}  # CUtensorMapDataType


class Encoding:
    """What the driver is told of a tensor descriptor whatever the sizes of the tensor.

    Attributes:
        rank: axes of the tensor.
        element_bytes: bytes of one element.
    """

    __slots__ = ("_box", "_boxes", "_dtype", "_kind", "_steps", "_swizzle", "element_bytes", "rank")

    def __init__(self, *, dtype: str, rank: int, box: tuple[int, ...], swizzle: int, element_bytes: int) -> None:
        """Describe what one copy takes: `box` elements of each axis."""
        self._dtype, self._swizzle, self.rank, self.element_bytes = dtype, swizzle, rank, element_bytes
        self._kind = TENSOR_MAP_DTYPES[dtype]
        self._boxes = (c_uint32 * (2 * rank))(*box[::-1], *[1] * rank)
        boxes = ctypes.addressof(self._boxes)
        self._box, self._steps = driver.pointer_to(boxes), driver.pointer_to(boxes + 4 * rank)

    def encoder(self, sizes: int) -> Callable[[int, int, int], None]:
        """What has the driver encode a descriptor at an address of the tensor at a pointer, in the memory of a plan.

        It takes the three as (address, pointer, start). The tensor's shape, innermost first, then its strides in bytes
        but the innermost, lie `sizes` bytes behind the memory's start.

        It raises LaunchError where the driver refuses, e.g. for an address or a stride that is not a multiple of 16.
        """
        # without `argtypes`, which would look at each of 12 arguments: what is no address is an int or an enum
        encode = driver.library()["cuTensorMapEncodeTiled"]
        as_address, kind, rank, swizzle = driver.pointer_to, self._kind, self.rank, self._swizzle
        box, steps, strides, refuse = self._box, self._steps, sizes + 8 * rank, self._refuse

        def encode_at(address: int, pointer: int, start: int) -> None:
            code = encode(
                as_address(address),
                kind,
                rank,
                as_address(pointer),
                as_address(start + sizes),
                as_address(start + strides),
                box,
                steps,
                0,
                swizzle,
                L2_PROMOTION_128B,
                0,
            )
            if code:
                refuse(code, start + sizes)

        return encode_at

    def _refuse(self, code: int, sizes: int) -> None:
        rank = self.rank
        numbers = list((c_uint64 * (2 * rank - 1)).from_address(sizes))
        shape, steps, box = (tuple(one[::-1]) for one in (numbers[:rank], numbers[rank:], self._boxes[:rank]))
        strides = (*(step // self.element_bytes for step in steps), 1)
        driver.check(code, f"describe a {self._dtype} tensor of shape {shape}, strides {strides}, box {box}")


class PlanMemory:
    """What the driver reads at the launches of one geometry.

    Attributes:
        words: an array that may be written.
        start: the address of the first word.
        described: for each descriptor its only pointer so far, which is 0 where there is none, or the addresses of as
            many descriptors by their pointers.
        buffers: those that do not lie among the words.
        stream: the one that launches are on, and that counters are of; -1 where that is to be written.
    """

    __slots__ = ("buffers", "described", "start", "stream", "words")

    def __init__(self, words: Any, start: int, described: list[int | dict[int, int]], stream: int) -> None:
        """Hold them."""
        self.words, self.start, self.described, self.stream = words, start, described, stream
        self.buffers: tuple[Any, ...] = ()


PointTo = Callable[[PlanMemory, int], None]
"""Makes the descriptors of a tensor point to its memory, or raises `LaunchError` and changes nothing."""


class MapPlace:
    """Where the descriptors of one tensor of a plan lie, whatever the sizes."""

    def __init__(self, number: int, encoding: Encoding, *, sizes: int, room: int) -> None:
        """Place them; bytes are counted from the start of a plan's memory.

        Args:
            number: its place in `PlanMemory.described`.
            encoding: what the driver is told of them but the sizes.
            sizes: bytes before those, see `Encoding.encoder`.
            room: bytes before the first descriptor, or up to `TENSOR_MAP_ALIGNMENT` more than that.
        """
        self._number, self._encode, self._room = number, encoding.encoder(sizes), room

    def at(self, memory: PlanMemory, pointer: int) -> int:
        """The address of the descriptor of the tensor at `pointer`.

        Raises:
            LaunchError: the driver refuses, e.g. for an address or a stride that is not a multiple of 16 bytes.
        """
        found = memory.described[self._number]
        return (found.get(pointer) if isinstance(found, dict) else None) or self._describe(memory, pointer)

    def pointer_writer(self, entry: int, word: int | None) -> PointTo:
        """What writes that to the word `entry`, and `pointer` itself to another one, if any.

        `at` and what it does first at new sizes are spelled out, because a launch asks four times.
        """
        number, encode, first, describe = self._number, self._encode, self._room, self._describe

        def point_to(memory: PlanMemory, pointer: int) -> None:
            found, words = memory.described[number], memory.words
            if found.__class__ is dict:
                words[entry] = found.get(pointer) or describe(memory, pointer)
            elif found:
                words[entry] = describe(memory, pointer)
            else:
                room = (start := memory.start) + first
                room += -room % TENSOR_MAP_ALIGNMENT
                encode(room, pointer, start)
                memory.described[number] = pointer
                words[entry] = room
            if word is not None:
                words[word] = pointer

        return point_to

    def _describe(self, memory: PlanMemory, pointer: int) -> int:
        """The same as `at` for a pointer that is not known yet, or the only one."""
        known, start = memory.described[self._number], memory.start
        if not isinstance(known, dict):
            room = start + self._room
            room += -room % TENSOR_MAP_ALIGNMENT
            if not known:
                self._encode(room, pointer, start)
                memory.described[self._number] = pointer
            if not known or known == pointer:
                return room
            # no sooner: at a new length most tensors have one pointer for a while
            memory.described[self._number] = known = {known: room}
        pattern = next(iter(known.values()))
        is_full = len(known) >= TENSOR_MAPS_KEPT
        address, buffer = (pattern, None) if is_full else _copy_of(pattern)
        code = driver.library().cuTensorMapReplaceAddress(address, pointer)
        if code:
            driver.check(code, f"describe a tensor at {pointer:#x}")
        if is_full:
            del known[next(iter(known))]
        else:
            memory.buffers = (*memory.buffers, buffer)
        known[pointer] = address
        return address


def _copy_of(pattern: int) -> tuple[int, Any]:
    """The address of a copy of a descriptor, and what keeps it."""
    buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    address = ctypes.addressof(buffer)
    address += -address % TENSOR_MAP_ALIGNMENT
    ctypes.memmove(address, pattern, TENSOR_MAP_BYTES)
    return address, buffer
