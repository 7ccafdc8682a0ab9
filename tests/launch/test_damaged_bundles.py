"""Of a damaged or planted bundle nothing gets in, and no kernel that was exchanged is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.settings import settings
from flashgen.launch import binaries, bundles
from tests.launch.bundle_files import FRESH, OTHER, entry, kept, read, remade, version, zstandard

pytestmark = pytest.mark.usefixtures("plain_compiler")


def test_a_damaged_bundle_is_refused_whole(bundle: Path) -> None:
    whole = bundle.read_bytes()
    length = len(whole)
    for position in [*range(0, 400, 7), *range(400, length, length // 60), length - 1]:
        bundle.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(DatabaseError):
            bundles.install(bundle)
    for cut in (0, 5, 30, 60, 200, length // 2, length - 1):
        bundle.write_bytes(whole[:cut])
        with pytest.raises(DatabaseError):
            bundles.install(bundle)
    bundle.write_bytes(whole + b"\0")
    with pytest.raises(DatabaseError, match="ends behind its last kernel"):
        bundles.install(bundle)
    assert kept() == []


def test_a_bundle_that_is_exchanged_while_it_is_imported_is_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed is the hash of the one that was checked."""
    bundles.write(tmp_path / "evil", [entry(*OTHER)], ["sm90"], version())
    monkeypatch.setattr(bundles, "remove_abandoned", lambda folder: os.replace(tmp_path / "evil", bundle))
    with pytest.raises(DatabaseError, match="stays as it is while it is imported"):
        bundles.install(bundle)
    assert kept() == []


def test_of_a_bundle_that_cannot_be_kept_whole_nothing_is_kept(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def full(path: Path, content: bytes) -> None:
        if written:
            raise OSError("no space left on device")
        written.append(path)
        path.write_bytes(content)

    monkeypatch.setattr(bundles, "write_whole", full)
    with pytest.raises(DatabaseError, match="no space left"):
        bundles.install(bundle)
    assert written
    assert kept() == []


def test_kernels_are_of_a_bounded_size_together(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MOST_UNPACKED_BYTES", 100)
    with pytest.raises(DatabaseError, match="its kernels have at most 0 GiB together"):
        bundles.install(bundle)


def put(head: dict[str, Any], entries: list[bytes], content: bytes, size: int | None = None) -> None:
    """Another first entry, with the right hash."""
    entries[0] = content
    head["entries"][0] |= {"sha256": hashlib.sha256(content).hexdigest(), "compressed": len(content)}
    if size is not None:
        head["entries"][0]["bytes"] = size


def _bomb(head: dict[str, Any], entries: list[bytes]) -> None:
    put(head, entries, zstandard.ZstdCompressor().compress(bytes(256 * 2**20)), 1000)


def _large_bomb(head: dict[str, Any], entries: list[bytes]) -> None:
    put(head, entries, zstandard.ZstdCompressor().compress(bytes(256 * 2**20)), 256 * 2**20)


def _compressed_again(head: dict[str, Any], entries: list[bytes]) -> None:
    """The same kernel in other bytes, under the hash of the first ones."""
    entries[0] = zstandard.ZstdCompressor(level=1).compress(zstandard.ZstdDecompressor().decompress(entries[0]))
    head["entries"][0]["compressed"] = len(entries[0])


def _no_frame(head: dict[str, Any], entries: list[bytes]) -> None:
    put(head, entries, b"no frame at all")


def _no_kernel(head: dict[str, Any], entries: list[bytes]) -> None:
    put(head, entries, zstandard.ZstdCompressor().compress(b"{}" * 100), 200)


def _exchanged(head: dict[str, Any], entries: list[bytes]) -> None:
    first, second = head["entries"]
    first["key"], second["key"] = second["key"], first["key"]


def _path_for_key(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"][0]["key"] = key = "../../../" + head["entries"][0]["key"][9:]
    content = binaries.packed(FRESH, key)
    put(head, entries, zstandard.ZstdCompressor().compress(content), len(content))


def _path_for_version(head: dict[str, Any], entries: list[bytes]) -> None:
    head["triton"] = "3.6.0/../../x"


def _escape_for_target(head: dict[str, Any], entries: list[bytes]) -> None:
    head["targets"] = ["sm90\x1b[2J"]


def _twice(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"].append(head["entries"][0])
    entries.append(entries[0])


def _later_format(head: dict[str, Any], entries: list[bytes]) -> None:
    head["format"] = 2


def _list_for_entry(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"][0] = []


def _negative(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"][0]["compressed"] = -1


def _infinite(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"][0]["bytes"] = float("inf")  # JSON has 1e999 for it


def _half(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"][0]["bytes"] += 0.5


def _long_format(head: dict[str, Any], entries: list[bytes]) -> None:
    head["format"] = "x" * 100_000


def _long_version(head: dict[str, Any], entries: list[bytes]) -> None:
    head["triton"] = "x" * 100_000


def _many_targets(head: dict[str, Any], entries: list[bytes]) -> None:
    head["targets"] = [f"sm{number}" for number in range(1000)]


def _target_of_none(head: dict[str, Any], entries: list[bytes]) -> None:
    head["entries"][0]["target"] = "sm80"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (_bomb, "has the size that its index states"),
        (_large_bomb, "bytes of a kernel must be at most 16777216"),
        (_compressed_again, "has the hash that its index states"),
        (_no_frame, "can be decompressed"),
        (_no_kernel, "states the key of its index"),
        (_exchanged, "states the key of its index"),
        (_path_for_key, "keys of 64 hexadecimal digits"),
        (_path_for_version, "names a version of Triton"),
        (_escape_for_target, "architectures in letters and digits"),
        (_twice, "each once"),
        (_later_format, "its format is 1, got 2"),
        (_list_for_entry, "an index that this flashgen reads"),
        (_negative, "bytes of a kernel must be at least 1"),
        (_infinite, "bytes of a kernel must be a whole number"),
        (_half, "bytes of a kernel must be a whole number"),
        (_long_format, "its format is 1, got 'xxx"),
        (_long_version, "names a version of Triton"),
        (_many_targets, "for 64 architectures"),
        (_target_of_none, "for the architectures that it names"),
    ],
)
def test_a_made_up_bundle_is_refused_whole(bundle: Path, change: Callable[..., None], rule: str) -> None:
    remade(bundle, lambda head, entries: None)
    assert len(bundles.install(bundle).sizes) == 2
    for path in (settings().cache_dir / binaries.BUNDLES).iterdir():
        path.unlink()
    remade(bundle, change)
    with pytest.raises(DatabaseError, match=rule) as caught:
        bundles.install(bundle)
    assert len(str(caught.value)) < 1000
    assert kept() == []


def with_header(content: bytes, change: dict[str, Any]) -> bytes:
    """A kernel whose first part is described in another way, with the right checksum."""
    body = content[len(binaries.MAGIC) + 32 :]
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    header["parts"][0] |= change
    head = json.dumps(header).encode()
    body = len(head).to_bytes(8, "little") + head + body[end:]
    return binaries.MAGIC + hashlib.sha256(body).digest() + body


BOX = {"block_size": [1, 1, 64, 64], "swizzle": 3}
DESCRIBED = [
    ({"num_warps": -1}, "num_warps must be at least 1"),
    ({"num_warps": True}, "num_warps must be a whole number"),
    ({"num_warps": 2**40}, "num_warps must be at most 32"),
    ({"shared": "x"}, "shared must be a whole number"),
    ({"shared": 2**31}, "shared must be at most"),
    ({"registers": None}, "registers must be a whole number"),
    ({"spills": float("inf")}, "spills must be a whole number"),
    ({"bytes": -1}, "bytes must be at least 1"),
    ({"bytes": 5}, "as long as their header says"),
    ({"name": "a b"}, "name is a name"),
    ({"entry": 3}, "entry must be text"),
    ({"boxes": 3}, "boxes must be a list"),
    ({"boxes": [3]}, "a box has a block_size and a swizzle"),
    ({"boxes": [BOX | {"block_size": [1] * 9}]}, "block_size has at most 5"),
    ({"boxes": [BOX | {"block_size": []}]}, "at least one dimension"),
    ({"boxes": [BOX | {"block_size": [1, 1, 64, 2**33]}]}, "block_size must be at most"),
    ({"boxes": [BOX | {"swizzle": "x"}]}, "swizzle must be a whole number"),
    ({"parameter_bytes": "8"}, "parameter_bytes must be a list"),
    ({"parameter_bytes": [8, 8.5]}, "parameter_bytes must be a whole number"),
]


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(("change", "rule"), DESCRIBED)
def test_a_kernel_that_is_described_wrongly_is_refused(bundle: Path, change: dict[str, Any], rule: str) -> None:
    first = entry()
    made_up = replace(first, content=with_header(first.content, change))
    bundles.write(bundle, [made_up, entry(*OTHER)], ["sm90"], version())
    with pytest.raises(DatabaseError, match=rule):
        bundles.install(bundle)
    assert kept() == []
    bundles.write(bundle, [first], ["sm90"], version())
    bundles.install(bundle)
    assert read() is not None
    binaries.path_of(binaries.BUNDLES, first.key).write_bytes(made_up.content)  # as an earlier flashgen took it over
    assert read() is None


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("boxes", [[], [BOX], [BOX] * 20, [{"block_size": [64], "swizzle": 3}] * 4])
def test_a_kernel_has_a_box_for_each_of_its_descriptors(bundle: Path, boxes: list[object]) -> None:
    first = entry()
    bundles.write(bundle, [replace(first, content=with_header(first.content, {"boxes": boxes}))], ["sm90"], version())
    bundles.install(bundle)
    assert read() is None


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kernels")
    for path in (tmp_path / "pipe.kernels", tmp_path, Path("/dev/zero")):
        with pytest.raises(DatabaseError, match="a bundle is a plain file"):
            bundles.install(path)
    with pytest.raises(DatabaseError, match=r"a bundle to read must exist, got .*nothing"):
        bundles.install(tmp_path / "nothing")


@pytest.mark.usefixtures("trusted")
def test_a_kept_kernel_that_was_exchanged_is_not_loaded(bundle: Path) -> None:
    bundles.install(bundle)
    (first, second) = sorted((settings().cache_dir / binaries.BUNDLES).glob(f"*{binaries.SUFFIX}"))
    mine = first if first.stem == entry().key[:32] else second
    other = second if mine is first else first
    mine.write_bytes(other.read_bytes())
    assert read() is None
    bundles.install(bundle)
    assert read() is not None
    mine.chmod(0o666)
    assert read() is None
