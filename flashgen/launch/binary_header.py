"""The header of a file of compiled kernels: every figure of it is checked before anything believes one.

Whoever trusts a bundle trusts its machine code; a launch with a size that no GPU has is an error of the driver's, or
reads what lies behind a list, and is refused here in words.
"""

from __future__ import annotations

import json
import re
from typing import Any

from flashgen.core.checks import items, text, whole_number

MAX_PARTS = 16
"""Kernels of one config; a backward pass has four."""

MAX_WARPS = 32
"""Of a block: CUDA allows 1024 threads."""

MAX_SHARED_BYTES = 2**20
"""Of a block; the largest of today's GPUs have 227 KiB."""

MAX_BOX, MAX_RANK, MAX_SWIZZLE = 256, 5, 8
"""Of a tensor descriptor: elements along a dimension, dimensions, and the number of a mode."""

MAX_PARAMETERS = 512
MAX_PARAMETER_BYTES = 4096
"""Of all parameters of a kernel together, and so of one."""

_LENGTH_BYTES = 8
_NAME = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.]{0,499}")
_PART = ("entry", "name", "shared", "num_warps", "boxes", "parameter_bytes", "registers", "spills", "bytes")


def read_header(content: memoryview, largest: int) -> tuple[dict[str, Any], int]:
    """The header that begins `content`, and where it ends; the text and the binaries fill what follows it.

    Raises:
        ValueError: it has none, or one that breaks a rule; `largest` bounds the bytes of each thing.
    """
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(bytes(content[_LENGTH_BYTES:start]))
    except RecursionError as error:
        raise ValueError("a header is JSON of a few levels") from error
    if not isinstance(header, dict) or not header.keys() >= {"key", "text", "parts"}:
        raise ValueError("a header has a key, the length of a text and parts")
    text("key", header["key"], most=100)
    whole_number("text", header["text"], 0, largest)
    parts = _listed("parts", header["parts"], MAX_PARTS)
    if not parts:
        raise ValueError("a header has at least one part")
    for part in parts:
        _check_part(part, largest)
    if start + header["text"] + sum(part["bytes"] for part in parts) != len(content):
        raise ValueError("a text and binaries are as long as their header says")
    return header, start


def _check_part(part: object, largest: int) -> None:
    if not isinstance(part, dict) or not part.keys() >= set(_PART):
        raise ValueError(f"a part has {', '.join(_PART)}")
    for name in ("entry", "name"):
        if not _NAME.fullmatch(text(name, part[name], most=500)):
            raise ValueError(f"{name} is a name in letters and digits")
    whole_number("shared", part["shared"], 0, MAX_SHARED_BYTES)
    whole_number("num_warps", part["num_warps"], 1, MAX_WARPS)
    whole_number("registers", part["registers"], 0)
    whole_number("spills", part["spills"], 0)
    whole_number("bytes", part["bytes"], 1, largest)
    for box in _listed("boxes", part["boxes"], MAX_PARAMETERS):
        _check_box(box)
    for size in _listed("parameter_bytes", part["parameter_bytes"], MAX_PARAMETERS):
        whole_number("parameter_bytes", size, 1, MAX_PARAMETER_BYTES)


def _check_box(box: object) -> None:
    if not isinstance(box, dict) or not box.keys() >= {"block_size", "swizzle"}:
        raise ValueError("a box has a block_size and a swizzle")
    sizes = _listed("block_size", box["block_size"], MAX_RANK)
    if not sizes:
        raise ValueError("block_size has at least one dimension")
    for size in sizes:
        whole_number("block_size", size, 1, MAX_BOX)
    whole_number("swizzle", box["swizzle"], 0, MAX_SWIZZLE)


def _listed(name: str, value: object, most: int) -> tuple[Any, ...]:
    found = items(name, value if isinstance(value, list) else None)
    if len(found) > most:
        raise ValueError(f"{name} has at most {most} entries, got {len(found)}")
    return found
