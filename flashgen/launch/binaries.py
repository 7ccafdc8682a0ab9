"""Compiled kernels on disk: what a launch needs of them, so that a process that finds them imports no compiler.

A file holds a JSON header and machine code, and nothing of it is executed here. It is believed if it lies in a folder
of this user that nobody else can write to, if its checksum is right and if it states the key that was asked for;
otherwise the kernel is compiled, and the file written anew.

    magic, SHA-256 of what follows, length of the header (8 bytes), header, text of the kernel, binaries in order
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.build_key import build_key, bundle_key, helper_build_key, helper_bundle_key, triton_version
from flashgen.codegen.families import family
from flashgen.codegen.family import KernelSpec
from flashgen.codegen.helper import HelperKernel
from flashgen.codegen.render import KernelSource
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.folders import CAN_TELL_OWNERS, is_own, remove_abandoned, write_whole
from flashgen.core.settings import cache_folder, settings
from flashgen.core.workload import Specialization
from flashgen.launch.binary_header import read_header
from flashgen.launch.parameters import block_of, is_descriptor, ptx_sizes
from flashgen.launch.plan import known_layout

MAGIC = b"flashgen binary\n"
SUFFIX = ".kernel"
FOLDER = "binaries"
BUNDLES = "bundles"
"""Of kernels that others have compiled (`flashgen.launch.bundles`), under keys that hold on every machine."""

SIGNED_BUNDLES = "bundles-signed"
"""Of those that were imported while a policy asked for signatures; while it does, no others are read."""

VERSION_SUFFIX = ".triton"
"""Of an empty file in it that names a version of Triton."""

LARGEST_BYTES = 16 * 2**20
"""Of one file; the largest kernels have some 600 kB."""

MOST_BYTES = 256 * 2**20
"""Of all files together: some 800 kernels. Beyond it the oldest ones go."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredHandle:
    """The part of Triton's compiled kernel that a launch through the driver reads.

    Attributes:
        metadata: name, shared, num_warps and tensordesc_meta, as Triton has them.
        asm: the binary, as `cubin`.
        hash: tells it from every other kernel.
        parameter_bytes: sizes of the parameters in its PTX.
    """

    metadata: SimpleNamespace
    asm: dict[str, bytes]
    hash: str
    parameter_bytes: tuple[int, ...]


def read(spec: Specialization, config: Config, device: Device) -> CompiledKernel | None:
    """The kernels of a config from an earlier process or a trusted bundle; None where there are none, or in doubt."""
    keys = _Keys(partial(build_key, spec, config, device), partial(bundle_key, spec, config, device))
    return _found(keys, config.family, partial(family(config.family).kernels, spec, config), device)


def read_helper(helper: HelperKernel, device: Device) -> CompiledKernel | None:
    """The same of a helper kernel."""
    keys = _Keys(partial(helper_build_key, helper, device), partial(helper_bundle_key, helper, device))
    return _found(keys, helper.id, lambda: (helper.kernel,), device)


class _Keys(NamedTuple):
    """What makes the key of kernels that were compiled here, and that of those in bundles for a version of Triton."""

    build: Callable[[], str | None]
    bundle: Callable[[str], str | None]


Kernels = Callable[[], tuple[KernelSpec, ...]]


def _found(keys: _Keys, entry: str, kernels: Kernels, device: Device) -> CompiledKernel | None:
    if not CAN_TELL_OWNERS:
        return None
    key = keys.build()
    found = None if key is None else _read(FOLDER, key, entry, kernels, device)
    if found is None and settings().trust_binaries:
        folders = (SIGNED_BUNDLES,) if settings().signatures else (BUNDLES, SIGNED_BUNDLES)
        for folder, version in [(each, version) for each in folders for version in _bundled_versions(each)]:
            key = keys.bundle(version)
            if key is not None and (found := _read(folder, key, entry, kernels, device)) is not None:
                return found
    return found


def _read(folder: str, key: str, entry: str, kernels: Kernels, device: Device) -> CompiledKernel | None:
    try:
        content = _content(path_of(folder, key))
        return None if content is None else _kernel(content, key, entry, kernels(), device)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _bundled_versions(folder: str) -> list[str]:
    """The Triton that is installed; where there is none, every one that a bundle was made with, newest first."""
    version = triton_version()
    if version is not None:
        return [version]
    try:
        names = [path.name for path in cache_folder(folder).glob(f"*{VERSION_SUFFIX}")]
    except OSError:
        return []
    return [name.removesuffix(VERSION_SUFFIX) for name in sorted(names, key=_numbers, reverse=True)]


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]


def write(compiled: CompiledKernel, spec: Specialization, config: Config) -> None:
    """Keep the kernels of a config for later processes.

    Where they are launched through Triton, where there is no place for them or no room, nothing is kept.
    """
    _write(compiled, build_key(spec, config, compiled.device))


def write_helper(compiled: CompiledKernel, helper: HelperKernel) -> None:
    """The same of a helper kernel."""
    _write(compiled, helper_build_key(helper, compiled.device))


def _write(compiled: CompiledKernel, key: str | None) -> None:
    if key is None or not CAN_TELL_OWNERS or any(known_layout(part) is None for part in compiled.parts):
        return
    content = packed(compiled, key)
    if len(content) <= LARGEST_BYTES:
        with contextlib.suppress(OSError):
            _save(path_of(FOLDER, key), content)


def packed(compiled: CompiledKernel, key: str) -> bytes:
    """The content of a file for these kernels under a key."""
    binaries = [part.handle.asm["cubin"] for part in compiled.parts]
    text = compiled.source.text.encode()
    header = {"key": key, "text": len(text), "parts": [_described(part) for part in compiled.parts]}
    head = json.dumps(header).encode()
    body = b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, text, *binaries])
    return MAGIC + hashlib.sha256(body).digest() + body


def stated_key(content: bytes) -> str | None:
    """The key that the content of a file states; None if its checksum is wrong.

    Raises:
        ValueError: it has no header, or one that breaks a rule.
    """
    body = _checked(memoryview(content))
    if body is None:
        return None
    key: str = read_header(body, LARGEST_BYTES)[0]["key"]
    return key


def path_of(folder: str, key: str) -> Path:
    """Where the kernels of a key lie in a folder of the cache directory."""
    return cache_folder(folder) / f"{key[:32]}{SUFFIX}"


def _content(path: Path) -> memoryview | None:
    """What follows the checksum of a file of ours; None for any other file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    with os.fdopen(descriptor, "rb") as file:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode) or not is_own(seen) or seen.st_size > LARGEST_BYTES + 1024:
            return None
        return _checked(memoryview(file.read()))


def _checked(raw: memoryview) -> memoryview | None:
    """What follows the checksum, if that is right."""
    start = len(MAGIC) + _DIGEST_BYTES
    if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(raw[start:]).digest() != raw[len(MAGIC) : start]:
        return None
    return raw[start:]


def _described(part: CompiledPart) -> dict[str, object]:
    metadata = part.handle.metadata
    boxes = getattr(metadata, "tensordesc_meta", None) or ()
    return {
        "entry": part.kernel.entry,
        "name": metadata.name,
        "shared": metadata.shared,
        "num_warps": metadata.num_warps,
        "boxes": [{"block_size": list(box["block_size"]), "swizzle": box["swizzle"]} for box in boxes],
        "parameter_bytes": ptx_sizes(part.handle.asm["ptx"]),
        "registers": part.registers,
        "spills": part.spills,
        "bytes": len(part.handle.asm["cubin"]),
    }


def _kernel(
    content: memoryview, key: str, entry: str, kernels: tuple[KernelSpec, ...], device: Device
) -> CompiledKernel | None:
    """The kernels that a file describes, if they are those of the key and launch as this flashgen launches kernels."""
    header, start = read_header(content, LARGEST_BYTES)
    if header["key"] != key or [part["entry"] for part in header["parts"]] != [kernel.entry for kernel in kernels]:
        return None
    text = str(content[start : start + header["text"]], "utf-8")
    start += header["text"]
    parts = []
    for number, (described, kernel) in enumerate(zip(header["parts"], kernels, strict=True)):
        cubin = bytes(content[start : start + described["bytes"]])
        start += described["bytes"]
        handle = _handle(described, cubin, f"{key}/{number}")
        parts.append(
            CompiledPart(
                kernel=kernel,
                registers=described["registers"],
                spills=described["spills"],
                shared_bytes=described["shared"],
                num_warps=described["num_warps"],
                compile_ms=0.0,
                handle=handle,
            )
        )
    if any(known_layout(part) is None or not _has_boxes(part) for part in parts):
        return None
    return CompiledKernel(source=KernelSource(entry=entry, text=text), device=device, parts=tuple(parts))


def _has_boxes(part: CompiledPart) -> bool:
    """Whether a kernel has a box of the right rank for each of its tensor descriptors."""
    ranks = [len(block_of(parameter)) for parameter in part.kernel.parameters if is_descriptor(parameter)]
    return ranks == [len(box["block_size"]) for box in part.handle.metadata.tensordesc_meta]


def _handle(described: dict[str, Any], cubin: bytes, name: str) -> StoredHandle:
    metadata = SimpleNamespace(
        name=described["name"],
        shared=described["shared"],
        num_warps=described["num_warps"],
        tensordesc_meta=described["boxes"],
    )
    sizes = tuple(described["parameter_bytes"])
    return StoredHandle(metadata=metadata, asm={"cubin": cubin}, hash=name, parameter_bytes=sizes)


def _save(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, after making room for it."""
    _make_room(path.parent, len(content))
    write_whole(path, content)  # another process may be writing the same kernel


def _make_room(folder: Path, needed: int) -> None:
    """Delete the oldest files until `needed` more bytes fit, and drafts that nobody will finish."""
    kept = sorted(_stored(folder))
    total = needed + sum(size for _, size, _ in kept)
    for _, size, path in kept:
        if total <= MOST_BYTES:
            return
        with contextlib.suppress(FileNotFoundError):  # another process makes room, too
            os.unlink(path)
        total -= size


def _stored(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Time, size and path of every file; drafts of killed processes are deleted before."""
    remove_abandoned(folder)
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            seen = entry.stat(follow_symlinks=False)
            yield seen.st_mtime, seen.st_size, entry.path
