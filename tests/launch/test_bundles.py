"""Bundles: kernels that others have compiled serve where their user trusts them, and nothing else gets in."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen import build_key as keys
from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.core.errors import DatabaseError, SettingError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch import binaries, bundles
from tests.launch.kernels import kernel
from tests.tiers import EXHAUSTIVE

zstandard = pytest.importorskip("zstandard")

ROOT = Path(__file__).resolve().parents[2]
H200 = find_device("h200")
SPEC, CONFIG, FRESH = kernel("descriptors")
OTHER = kernel("pointers")


@pytest.fixture(autouse=True)
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "h200.kernels"
    path.write_bytes(two_kernels())
    return path


@functools.cache
def two_kernels() -> bytes:
    """A bundle of both, written once for all tests that read one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "h200.kernels")
        bundles.write(path, [entry(), entry(*OTHER)], ["sm90"], version())
        return path.read_bytes()


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_BINARIES", "trusted")
    settings.cache_clear()


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


@pytest.mark.usefixtures("trusted")
def test_a_kernel_of_a_bundle_is_the_one_that_was_compiled(bundle: Path) -> None:
    assert read() is None
    contents = bundles.install(bundle, target="sm90")
    assert (len(contents.sizes), contents.triton, contents.targets) == (2, version(), ("sm90",))
    found = read()
    assert (found.source, found.device) == (FRESH.source, FRESH.device)
    assert [part.handle.asm["cubin"] for part in found.parts] == [part.handle.asm["cubin"] for part in FRESH.parts]
    assert not (settings().cache_dir / binaries.FOLDER).exists() or not os.listdir(settings().cache_dir / "binaries")


def test_equal_kernels_are_equal_bundles(bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.kernels"
    bundles.write(again, [entry(*OTHER), entry()], ["sm90", "sm90"], version())
    assert again.read_bytes() == bundle.read_bytes()
    whole = sum(size for size, _ in bundles.install(bundle).sizes.values())
    assert bundle.stat().st_size < whole / 2


def test_what_is_not_trusted_is_not_loaded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles.install(bundle)
    assert read() is None
    monkeypatch.setenv("FLASHGEN_BINARIES", "1")
    settings.cache_clear()
    with pytest.raises(SettingError, match="FLASHGEN_BINARIES is trusted or not set, got '1'"):
        settings()


@pytest.mark.usefixtures("trusted")
def test_kernels_of_another_device_are_not_found(bundle: Path) -> None:
    with pytest.raises(DatabaseError, match=r"for the GPU that it is imported for, sm100; .* is for sm90"):
        bundles.install(bundle, target="sm100")
    assert kept() == []
    bundles.install(bundle)
    assert binaries.read(SPEC, CONFIG, find_device("b200")) is None
    assert binaries.read(SPEC, CONFIG, find_device("a100")) is None


@pytest.mark.usefixtures("trusted")
def test_kernels_of_another_triton_are_not_found(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles.install(bundle)
    monkeypatch.setattr(keys, "_compiler", lambda: ("3.99.0", "files"))
    assert read() is None
    monkeypatch.setattr(keys, "_compiler", lambda: None)
    assert read() is not None, "where there is no Triton, that of the bundle is meant"


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("variable", ["DISABLE_PTXAS_OPT", "TRITON_PTXAS_PATH", *keys.ALWAYS_COMPILE])
def test_under_variables_of_the_compiler_no_bundle_serves(
    bundle: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles.install(bundle)
    monkeypatch.setenv(variable, "1")
    assert read() is None
    assert keys.bundle_key(SPEC, CONFIG, H200, version()) is None


def test_what_makes_another_kernel_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    function = UserFunction(name="f", source="def f(score, b, h, q, k):\n    return score\n")
    seen = {
        keys.bundle_key(SPEC, CONFIG, H200, "3.6.0"),
        keys.bundle_key(SPEC, CONFIG, H200, "3.7.0"),
        keys.bundle_key(SPEC, CONFIG, find_device("b200"), "3.6.0"),
        keys.bundle_key(replace(SPEC, aligned16=False), CONFIG, H200, "3.6.0"),
        keys.bundle_key(SPEC, OTHER[1], H200, "3.6.0"),
    }
    same = keys.bundle_key(SPEC, CONFIG, find_device("h100"), "3.6.0")
    assert same in seen
    assert keys.build_key(SPEC, CONFIG, H200) not in seen
    monkeypatch.setattr(keys, "_sources", lambda: "other templates")
    seen.add(keys.bundle_key(SPEC, CONFIG, H200, "3.6.0"))
    assert len(seen) == 6
    assert None not in seen
    assert keys.bundle_key(replace(SPEC, mods=ScoreMods(score_mod=function)), CONFIG, H200, "3.6.0") is None
    assert keys.bundle_key(SPEC, CONFIG, find_device("mi300x"), "3.6.0") is None


# --- damaged and planted ------------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("trusted")
def test_a_machine_takes_its_own_of_the_kernels_for_two_architectures(bundle: Path) -> None:
    other = replace(entry(*OTHER), target="sm80")
    bundles.write(bundle, [replace(entry(), target="sm90"), other], ["sm80", "sm90"], version())
    contents = bundles.install(bundle, target="sm90")
    assert (list(contents.sizes), contents.targets) == ([entry().key], ("sm90",))
    assert [name for name in kept() if name.endswith(binaries.SUFFIX)] == [f"{entry().key[:32]}{binaries.SUFFIX}"]
    assert read() is not None
    with pytest.raises(DatabaseError, match=r"imported for, sm100; .* is for sm80, sm90"):
        bundles.install(bundle, target="sm100")
    assert len(bundles.install(bundle).sizes) == 2


@pytest.mark.usefixtures("trusted")
def test_of_a_bundle_that_does_not_say_what_each_kernel_is_for_all_are_taken(bundle: Path) -> None:
    remade(bundle, lambda head, entries: [each.pop("target") for each in head["entries"]])
    remade(bundle, lambda head, entries: head["targets"].append("sm80"))
    assert len(bundles.install(bundle, target="sm90").sizes) == 2
    assert read() is not None


def test_drafts_of_killed_imports_are_cleared_away(bundle: Path) -> None:
    bundles.install(bundle)
    old, new = (settings().cache_dir / binaries.BUNDLES / f"{name}.tmp" for name in ("old", "new"))
    for draft in (old, new):
        draft.write_bytes(b"half")
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    os.utime(old, (long_ago, long_ago))
    bundles.install(bundle)
    assert (old.exists(), new.exists()) == (False, True)


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kernels")
    for path in (tmp_path / "pipe.kernels", tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(DatabaseError):
            bundles.install(path)


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


# --- a process without a compiler ---------------------------------------------------------------------------------


@EXHAUSTIVE
def test_a_process_without_a_compiler_makes_its_first_call(own_settings: Path, tmp_path: Path) -> None:
    """Neither Triton nor ptxas nor Jinja: importing the first fails, nothing is in PATH."""
    a100 = find_device("a100")
    spec = Specialization(direction="forward", dtype="bf16", head_dim=128, head_dim_v=128, causal=True)
    made = bundles.entry_of(spec, default_config(spec, a100), a100)
    assert made is not None
    path = tmp_path / "a100.kernels"
    bundles.write(path, [made], ["sm80"], version())
    bundles.install(path, target="sm80")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"FLASHGEN_QUIET": "1", "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "FLASHGEN_NO_COMPILE": "1"}
    code = (
        "import sys; sys.modules['triton'] = None; sys.argv = ['first_call', 'a100']\n"
        "import runpy; runpy.run_module('tests.fakes.first_call', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "FLASHGEN_BINARIES": "trusted"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "flashgen" in imported
    assert not {"triton", "jinja2", "zstandard", "sqlalchemy"} & imported


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trusted key, under the policy that asks for signatures."""
    minisign = pytest.importorskip("tests.fakes.minisign")
    found = minisign.Signer()
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(found.publish(tmp_path / "keys" / "ours.pub")))
    settings.cache_clear()
    return found


@pytest.mark.usefixtures("trusted")
def test_a_bundle_that_is_signed_serves(bundle: Path, signer: Any) -> None:
    with pytest.raises(DatabaseError, match=r"h200\.kernels\.minisig is missing"):
        bundles.install(bundle)
    signer.sign(bundle)
    assert len(bundles.install(bundle, target="sm90").sizes) == 2
    assert read() is not None
    assert not list((settings().cache_dir / "signed").glob("*")), "the copy is not kept"
    content = bundle.read_bytes()
    bundle.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DatabaseError, match="was changed since"):
        bundles.install(bundle)


@pytest.mark.usefixtures("trusted")
def test_kernels_that_came_without_a_signature_are_not_loaded(
    bundle: Path, signer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHGEN_SIGNATURES")
    settings.cache_clear()
    bundles.install(bundle)
    assert read() is not None
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    settings.cache_clear()
    assert read() is None
    signer.sign(bundle)
    bundles.install(bundle)
    assert read() is not None
    monkeypatch.delenv("FLASHGEN_SIGNATURES")
    settings.cache_clear()
    shutil.rmtree(settings().cache_dir / binaries.BUNDLES)
    assert read() is not None, "signed ones serve anywhere"


@pytest.mark.usefixtures("trusted")
def test_a_bundle_that_is_exchanged_while_it_is_taken_over_is_what_was_signed(
    bundle: Path, signer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path) -> Any:
        bundle.write_bytes(b"exchanged")
        return real(path)

    real = bundles._opened
    monkeypatch.setattr(bundles, "_opened", opened)
    signer.sign(bundle)
    assert len(bundles.install(bundle).sizes) == 2
