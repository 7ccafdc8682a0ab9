"""A bundle of two kernels, what is kept and read of it, and the same bundle with other contents."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen import build_key as keys
from flashgen.core.device import find_device
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch import binaries, bundles
from tests.launch.kernels import kernel

zstandard = pytest.importorskip("zstandard")

H200 = find_device("h200")
SPEC, CONFIG, FRESH = kernel("descriptors")
OTHER = kernel("pointers")


@functools.cache
def two_kernels() -> bytes:
    """A bundle of both, written once for all tests that read one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "h200.kernels")
        bundles.write(path, [entry(), entry(*OTHER)], ["sm90"], version())
        return path.read_bytes()


def version() -> str:
    found = keys.triton_version()
    assert found is not None
    return found


def entry(spec: Specialization = SPEC, config: Any = CONFIG, compiled: Any = FRESH) -> bundles.Entry:
    key = keys.bundle_key(spec, config, H200, version())
    assert key is not None
    return bundles.Entry(key=key, content=binaries.packed(compiled, key))


def read() -> Any:
    return binaries.read(SPEC, CONFIG, H200)


def kept() -> list[str]:
    return sorted(path.name for path in (settings().cache_dir / binaries.BUNDLES).glob("*"))


def remade(path: Path, change: Callable[[dict[str, Any], list[bytes]], None]) -> None:
    """The bundle with another index and other entries, and the right hash of the index."""
    raw, start = path.read_bytes(), len(bundles.MAGIC) + 32
    length = int.from_bytes(raw[start : start + 8], "little")
    head, rest = json.loads(raw[start + 8 : start + 8 + length]), raw[start + 8 + length :]
    entries = []
    for each in head["entries"]:
        entries.append(rest[: each["compressed"]])
        rest = rest[each["compressed"] :]
    change(head, entries)
    text = json.dumps(head).encode()
    fixed = bundles.MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    path.write_bytes(fixed + text + b"".join(entries))
