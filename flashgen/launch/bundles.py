"""Bundles: compiled kernels in one file to give away, so that who trusts it needs no compiler.

A bundle holds machine code, which no check can prove harmless: nothing of it is used unless its user says so, once when
it is imported and once for every process (`FLASHGEN_BINARIES=trusted`). What can be checked is that it is whole, and
that each kernel is the one that is asked for: its key is made of the sources, the Triton, the target and the options.

    magic, SHA-256 of the index, length of the index (8 bytes), index (JSON), entries in order (zstd)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.build_key import bundle_key, helper_bundle_key, triton_version
from flashgen.core.checks import items, text, whole_number
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError
from flashgen.core.folders import DRAFT_SUFFIX, is_replaceable, remove_abandoned, write_public, write_whole
from flashgen.core.quoting import shown
from flashgen.core.settings import cache_folder, settings
from flashgen.core.workload import Specialization
from flashgen.launch import binaries
from flashgen.launch.plan import known_layout

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.codegen.helper import HelperKernel

MAGIC = b"flashgen bundle\n"
FORMAT = 1
LEVEL = 19
"""Of compression: a bundle is written once and fetched often."""

MOST_ENTRIES = 100_000
MOST_TARGETS = 64
MOST_BYTES = 4 * 2**30
"""Of a bundle; the largest, of all shipped records of an H200, has a few MB."""

MOST_UNPACKED_BYTES = 4 * 2**30
"""Of all kernels of one together; those of all shipped records of an H200 have 62 MB."""

_LARGEST_INDEX_BYTES = 64 * 2**20
_DIGEST_BYTES, _LENGTH_BYTES = 32, 8
_KEY = re.compile(r"[0-9a-f]{64}")
_TARGET = re.compile(r"[a-z0-9]{1,16}")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One compiled config: the content of a file of `flashgen.launch.binaries`, under a key of `bundle_key`.

    `target` is the architecture that it is for; empty where a bundle does not say it of each, and means all of its own.
    """

    key: str
    content: bytes
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the index of a bundle says.

    Attributes:
        digest: SHA-256 of the index, which has those of all entries.
        triton: the version that compiled it.
        targets: the architectures of its kernels.
        sizes: bytes of each entry by key: as they are, and compressed.
        target_of: the architecture of each entry by key, empty where the index does not say it.
    """

    digest: str
    triton: str
    targets: tuple[str, ...]
    sizes: dict[str, tuple[int, int]]
    target_of: dict[str, str]

    def only(self, target: str | None) -> Contents:
        """The entries for an architecture alone; all for None."""
        wanted = {key: size for key, size in self.sizes.items() if target in (None, self.target_of[key] or target)}
        return self if target is None else replace(self, targets=(target,), sizes=wanted)


def entry_of(spec: Specialization, config: Config, device: Device) -> Entry | None:
    """Compile a config for a device, present or not; None where its kernels cannot be given away.

    Raises:
        BuildError: it does not compile.
    """
    from flashgen.codegen.build import compile_kernel

    version = triton_version()
    key = None if version is None else bundle_key(spec, config, device, version)
    return None if key is None else _entry(compile_kernel(spec, config, device), key, device)


def entry_of_helper(helper: HelperKernel, device: Device) -> Entry | None:
    """The same of a helper kernel.

    Raises:
        BuildError: it does not compile.
    """
    from flashgen.codegen.build import compile_helper

    version = triton_version()
    key = None if version is None else helper_bundle_key(helper, device, version)
    return None if key is None else _entry(compile_helper(helper, device), key, device)


def _entry(compiled: CompiledKernel, key: str, device: Device) -> Entry | None:
    if any(known_layout(part) is None for part in compiled.parts):
        return None
    return Entry(key=key, content=binaries.packed(compiled, key), target=device.arch)


def write(path: Path, entries: Iterable[Entry], targets: Iterable[str], triton: str) -> Contents:
    """Write a bundle; equal entries give equal bytes.

    Raises:
        DatabaseError: it cannot be written, or `check_target` refuses the place.
    """
    check_target(path)
    compress, _ = _zstd()
    index: list[dict[str, object]] = []
    packed: list[bytes] = []
    for entry in sorted(entries, key=lambda entry: entry.key):
        packed.append(compress(entry.content))
        digest = hashlib.sha256(packed[-1]).hexdigest()
        sizes = {"bytes": len(entry.content), "compressed": len(packed[-1])}
        index.append({"key": entry.key, "target": entry.target, "sha256": digest, **sizes})
    head = {"format": FORMAT, "triton": triton, "targets": sorted(set(targets)), "entries": index}
    written = json.dumps(head, sort_keys=True).encode()
    digest_of_index = hashlib.sha256(written).digest()
    content = b"".join([MAGIC, digest_of_index, len(written).to_bytes(_LENGTH_BYTES, "little"), written, *packed])
    try:
        write_public(path, content)
    except OSError as error:
        raise DatabaseError(f"a bundle needs a place that can be written, got {path}: {error}") from error
    return _contents(head, digest_of_index.hex())


def check_target(path: Path) -> None:
    """Refuse to write a bundle where there is a file of others, or without what compresses it.

    Raises:
        DatabaseError: there is one, or no library for zstd is installed.
    """
    _zstd()
    try:
        if not is_replaceable(path, MAGIC):
            raise DatabaseError(f"a bundle takes the place of a bundle alone, which {path} is not")
    except OSError as error:
        raise DatabaseError(f"a bundle needs a place that can be read, got {path}: {error}") from error


def install(path: Path, *, target: str | None = None) -> Contents:
    """Take over the kernels of a bundle: all of them are whole and what the index says, or none is taken.

    Args:
        path: the bundle.
        target: the architecture of those that are wanted, None for all.

    Returns:
        What was taken over.

    Raises:
        DatabaseError: it is no bundle, damaged, not signed where a policy asks for it, or for other devices alone; or
            it cannot be kept.
    """
    if not settings().signatures:
        return _installed(path, path, binaries.BUNDLES, target)
    from flashgen.core.signatures import FOLDER, signed_copy

    try:
        with tempfile.TemporaryDirectory(dir=cache_folder(FOLDER), suffix=DRAFT_SUFFIX) as scratch:
            return _installed(path, signed_copy(path, Path(scratch)), binaries.SIGNED_BUNDLES, target)
    except OSError as error:
        raise DatabaseError(f"a bundle needs a place, {path}: {error}") from error


def _installed(name: Path, path: Path, kept_in: str, target: str | None) -> Contents:
    """Take over the kernels of a bundle that is called `name` from `path`."""
    try:
        found, entries = _opened(path)
        if target is not None and target not in found.targets:
            listed = ", ".join(found.targets) or "none"
            raise DatabaseError(f"a bundle is for the GPU that it is imported for, {target}; {name} is for {listed}")
        for _ in entries:  # all is well, or nothing is written
            pass
        digest, found = found.digest, found.only(target)
        folder = cache_folder(kept_in)
        remove_abandoned(folder)  # drafts of an import that was killed
        again, entries = _opened(path)
        if again.digest != digest:
            raise DatabaseError(f"a bundle stays as it is while it is imported, which {name} did not")
        with _all_or_none() as written:
            for entry in entries:
                if entry.key in found.sizes:
                    target_path = binaries.path_of(kept_in, entry.key)
                    if not target_path.exists():
                        written.append(target_path)
                    write_whole(target_path, entry.content)
        (folder / f"{found.triton}{binaries.VERSION_SUFFIX}").touch()
    except OSError as error:
        raise DatabaseError(f"a bundle is a file that can be read, and needs a place; {name}: {error}") from error
    return found


@contextlib.contextmanager
def _all_or_none() -> Iterator[list[Path]]:
    """New files, which are deleted again where the last of them cannot be written."""
    written: list[Path] = []
    try:
        yield written
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _opened(path: Path) -> tuple[Contents, Iterator[Entry]]:
    """The index, and the entries, each checked as it is read.

    Raises:
        DatabaseError: it is no bundle, or damaged.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise DatabaseError(f"a bundle to read must exist, got {path}")
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise DatabaseError(f"a bundle is a plain file of at most {MOST_BYTES >> 30} GiB, got {path}")
    with path.open("rb") as file:
        fixed = file.read(len(MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES)
        length = int.from_bytes(fixed[-_LENGTH_BYTES:], "little")
        index = file.read(min(length, _LARGEST_INDEX_BYTES))
    digest = fixed[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES]
    if not fixed.startswith(MAGIC) or len(index) != length or hashlib.sha256(index).digest() != digest:
        raise DatabaseError(
            f"a bundle is a file that `flashgen db export --with-binaries` wrote, and whole; got {path}"
        )
    try:
        head = json.loads(index)
        contents = _contents(head, digest.hex())
        hashes = [str(entry["sha256"]) for entry in head["entries"]]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DatabaseError(f"a bundle has an index that this flashgen reads; {path}: {str(error)[:300]}") from error
    return contents, _entries(path, contents, hashes, len(fixed) + length)


def _contents(head: dict[str, Any], digest: str) -> Contents:
    """What an index says.

    Raises:
        ValueError: it breaks a rule.
        KeyError, TypeError: something is missing, or of another type.
    """
    if head["format"] != FORMAT:
        raise ValueError(f"its format is {FORMAT}, got {shown(head['format'])}")
    entries, targets = items("entries", head["entries"]), items("targets", head["targets"])
    if len(entries) > MOST_ENTRIES or len(targets) > MOST_TARGETS:
        raise ValueError(f"it has at most {MOST_ENTRIES} kernels for {MOST_TARGETS} architectures")
    if not all(_TARGET.fullmatch(text("a target", target)) for target in targets):
        raise ValueError("it names architectures in letters and digits")
    if not _VERSION.fullmatch(text("triton", head["triton"])):
        raise ValueError(f"it names a version of Triton, got {shown(head['triton'])}")
    sizes = {text("a key", each["key"]): (_size(each["bytes"]), _size(each["compressed"])) for each in head["entries"]}
    if sum(size for size, _ in sizes.values()) > MOST_UNPACKED_BYTES:
        raise ValueError(f"its kernels have at most {MOST_UNPACKED_BYTES >> 30} GiB together")
    if len(sizes) != len(entries) or not all(map(_KEY.fullmatch, sizes)):
        raise ValueError("it has keys of 64 hexadecimal digits, each once")
    target_of = {each["key"]: text("the target of a kernel", each.get("target", "")) for each in head["entries"]}
    if not set(target_of.values()) <= {"", *targets}:
        raise ValueError("its kernels are for the architectures that it names")
    return Contents(
        digest=digest, triton=head["triton"], targets=tuple(head["targets"]), sizes=sizes, target_of=target_of
    )


def _size(value: object) -> int:
    return whole_number("the bytes of a kernel", value, 1, binaries.LARGEST_BYTES)


def _entries(path: Path, contents: Contents, hashes: list[str], start: int) -> Iterator[Entry]:
    _, decompress = _zstd()
    with path.open("rb") as file:
        file.seek(start)
        for (key, (size, compressed)), digest in zip(contents.sizes.items(), hashes, strict=True):
            packed = file.read(compressed)
            if len(packed) != compressed or hashlib.sha256(packed).hexdigest() != digest:
                raise DatabaseError(
                    f"every kernel of a bundle has the hash that its index states; {key} of {path} has not"
                )
            entry = Entry(key=key, content=decompress(packed, size), target=contents.target_of[key])
            if _stated(entry, path) != key:
                raise DatabaseError(f"every kernel of a bundle states the key of its index; {key} of {path} does not")
            yield entry
        if file.read(1):
            raise DatabaseError(f"a bundle ends behind its last kernel; {path} goes on")


def _stated(entry: Entry, path: Path) -> str | None:
    try:
        return binaries.stated_key(entry.content)
    except ValueError as error:
        raise DatabaseError(
            f"every kernel of a bundle has a header that can be launched by; {entry.key} of {path}: {str(error)[:300]}"
        ) from error


def _zstd() -> tuple[Any, Any]:
    """Functions that compress, and that decompress to a size that was stated.

    Raises:
        DatabaseError: no library is installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise DatabaseError("a bundle is compressed with zstd: pip install 'flashgen[bundles]'") from error

    def decompress(packed: bytes, size: int) -> bytes:
        try:
            # a frame that states another size, or none, is refused before memory is taken for it
            if zstandard.frame_content_size(packed) != size:
                raise DatabaseError("a kernel of a bundle has the size that its index states")
            content: bytes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        except zstandard.ZstdError as error:
            raise DatabaseError(f"a kernel of a bundle can be decompressed: {error}") from error
        return content

    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress, decompress
