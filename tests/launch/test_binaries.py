"""Compiled kernels on disk: the same launches as fresh ones, and no file is believed that might be another's."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashgen.codegen import build_key as keys
from flashgen.codegen.build import CompiledKernel
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch import binaries
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import make_plan
from flashgen.runtime.ops import kernel_cache
from tests.fakes.driver import FakeDriver
from tests.launch.kernels import kernel, tensors
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[2]
H200 = find_device("h200")
SPEC, CONFIG, FRESH = kernel("descriptors")


def path() -> Path:
    (found,) = (settings().cache_dir / binaries.FOLDER).glob(f"*{binaries.SUFFIX}")
    return found


@pytest.fixture
def stored() -> Path:
    binaries.write(FRESH, SPEC, CONFIG)
    return path()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith("TRITON_")]:
        monkeypatch.delenv(name)
    found = keys.build_key(SPEC, CONFIG, H200)
    assert found is not None
    return found


def read() -> CompiledKernel | None:
    return binaries.read(SPEC, CONFIG, H200)


@pytest.mark.parametrize("name", first(2, ["descriptors", "pointers", "descriptors-offsets"]))
def test_a_stored_kernel_is_launched_as_a_fresh_one(name: str, cuda: FakeDriver) -> None:
    spec, config, fresh = kernel(name)
    binaries.write(fresh, spec, config)
    found = binaries.read(spec, config, H200)
    assert found is not None
    assert (found.source, found.device) == (fresh.source, fresh.device)
    for one, other in zip(found.parts, fresh.parts, strict=True):
        # `programs` is another function that does the same
        assert replace(one.kernel, programs=other.kernel.programs) == other.kernel
        assert (one.registers, one.spills, one.shared_bytes) == (other.registers, other.spills, other.shared_bytes)
        assert one.handle.asm["cubin"] == other.handle.asm["cubin"]
    cuda.parameters = fresh.main.kernel.parameters
    q, k, v, out = tensors(spec)
    lse, offset = torch.empty(q.shape[:3]), torch.zeros(q.shape[0], dtype=torch.int32) if spec.offset_tensor else None
    for each in (found, fresh):
        make_plan(each, spec, config, Geometry.of(q, k, v, out), 0)(q, k, v, out, lse, 0.5, offset)
    first, second = cuda.launches
    assert first.values.keys() == second.values.keys()
    assert (first.grid, first.block, first.shared_bytes) == (second.grid, second.block, second.shared_bytes)
    assert [first.values[name] for name in first.values] == [second.values[name] for name in second.values]
    assert [one[1] for one in cuda.loaded] == [fresh.main.handle.metadata.name.encode()] * 2


def test_a_process_compiles_what_no_other_has_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def compile_kernel(*asked: object) -> CompiledKernel:
        compiled.append(asked)
        return FRESH

    monkeypatch.setattr("flashgen.codegen.build.compile_kernel", compile_kernel)
    monkeypatch.setattr(kernel_cache, "KERNELS", {})
    assert kernel_cache.compiled(SPEC, CONFIG, H200, 0) is FRESH
    monkeypatch.setattr(kernel_cache, "KERNELS", {})
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")  # nothing is compiled
    settings.cache_clear()
    found = kernel_cache.compiled(SPEC, CONFIG, H200, 0)
    assert found.main.handle.asm["cubin"] == FRESH.main.handle.asm["cubin"]
    assert len(compiled) == 1
    path().write_bytes(b"")
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "0")
    settings.cache_clear()
    monkeypatch.setattr(kernel_cache, "KERNELS", {})
    assert kernel_cache.compiled(SPEC, CONFIG, H200, 0) is FRESH
    assert read() is not None  # it is mended


def test_a_damaged_file_is_not_read(stored: Path) -> None:
    whole = stored.read_bytes()
    for position in (*range(120), len(whole) // 2, len(whole) - 1):
        stored.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert read() is None, position
    for length in (0, 1, len(binaries.MAGIC), 60, 1000, len(whole) - 1):
        stored.write_bytes(whole[:length])
        assert read() is None, length
    stored.write_bytes(whole + b"\0")
    assert read() is None
    stored.write_bytes(whole)
    assert read() is not None


def test_a_file_of_another_key_is_not_read(stored: Path) -> None:
    other = CONFIG.replace(num_stages=3 if CONFIG["num_stages"] == 2 else 2)
    wrong = keys.build_key(SPEC, other, H200)
    assert wrong is not None
    stored.rename(binaries.path_of(binaries.FOLDER, wrong))
    assert binaries.read(SPEC, other, H200) is None


def _foreign_file(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def fstat(descriptor: int) -> object:
        seen = real(descriptor)
        return SimpleNamespace(st_mode=seen.st_mode, st_size=seen.st_size, st_uid=seen.st_uid + 1, st_gid=seen.st_gid)

    monkeypatch.setattr(binaries, "os", SimpleNamespace(**{**vars(os), "fstat": fstat}))


def _pipe(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.unlink()
    os.mkfifo(stored)


def _writable_file(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.chmod(0o620)


def _writable_folder(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.parent.chmod(0o777)


def _linked_file(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.rename(stored.parent.parent / "elsewhere")
    stored.symlink_to(stored.parent.parent / "elsewhere")


def _linked_folder(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored.parent.rename(stored.parent.parent / "elsewhere")
    stored.parent.symlink_to(folder)


def _own_file_in_foreign_folder(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat

    def lstat(path: Path) -> object:
        seen = real(path)
        if path != stored.parent:
            return seen
        return SimpleNamespace(st_mode=seen.st_mode, st_uid=os.getuid() + 1, st_gid=seen.st_gid)

    monkeypatch.setattr(os, "lstat", lstat)


def _file_for_folder(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.unlink()
    stored.parent.rmdir()
    stored.parent.write_text("a file")


def _pipe_for_folder(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.unlink()
    stored.parent.rmdir()
    os.mkfifo(stored.parent)


def _device_file(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.unlink()
    stored.mkdir()


@pytest.mark.parametrize(
    "make",
    [_writable_folder, _linked_folder, _own_file_in_foreign_folder, _file_for_folder, _pipe_for_folder],
)
def test_a_folder_that_others_could_write_to_is_neither_read_nor_added_to(
    stored: Path,
    make: Callable[[Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert read() is not None
    make(stored, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match=rf"{stored.parent} cannot be used \(.*FLASHGEN_CACHE_DIR"):
        assert read() is None
    before = [(entry.name, entry.inode()) for entry in os.scandir(stored.parent)] if stored.parent.is_dir() else []
    binaries.write(FRESH, SPEC, CONFIG)  # it is said once
    if stored.parent.is_dir():
        assert [(entry.name, entry.inode()) for entry in os.scandir(stored.parent)] == before
    assert read() is not None
    (kept,) = tmp_path.glob(f"*/{binaries.FOLDER}/*")
    assert kept.name == stored.name
    assert [folder.stat().st_mode & 0o777 for folder in kept.parents[:2]] == [0o700, 0o700]


@pytest.mark.parametrize("make", [_writable_file, _linked_file, _device_file, _pipe])
def test_a_file_that_others_could_have_written_is_not_read(
    stored: Path, make: Callable[[Path, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read() is not None
    make(stored, monkeypatch)
    assert read() is None
    binaries.write(FRESH, SPEC, CONFIG)
    assert [entry.name for entry in os.scandir(stored.parent)] == [stored.name]  # no draft is left behind
    assert stored.is_dir() or (not stored.is_symlink() and read() is not None)


def test_a_file_of_another_user_is_not_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() is not None
    _foreign_file(stored, monkeypatch)
    assert read() is None


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*asked: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    settings()
    for name in ("mkdir", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            binaries.write(FRESH, SPEC, CONFIG)
            assert read() is None
    assert list((settings().cache_dir / binaries.FOLDER).iterdir()) == []


@pytest.mark.parametrize("where", ["replace", "fdopen"])
def test_a_process_that_is_stopped_while_it_writes_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*asked: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, where, stop)
        with pytest.raises(KeyboardInterrupt):
            binaries.write(FRESH, SPEC, CONFIG)
    assert list((settings().cache_dir / binaries.FOLDER).iterdir()) == []


def test_drafts_of_killed_processes_are_cleared_away(stored: Path) -> None:
    old, new = stored.parent / "old.tmp", stored.parent / "new.tmp"
    for draft in (old, new):
        draft.write_bytes(b"half")
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    os.utime(old, (long_ago, long_ago))
    binaries.write(FRESH, SPEC, CONFIG)
    assert (old.exists(), new.exists()) == (False, True)  # another process may be writing the second


def test_the_oldest_go_where_there_is_no_room(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = stored.stat().st_size
    for age in (1, 2, 3):
        other = stored.with_name(f"{age}{binaries.SUFFIX}")
        other.write_bytes(bytes(size))
        os.utime(other, (time.time() - 100 * age,) * 2)
    monkeypatch.setattr(binaries, "MOST_BYTES", 3 * size + 100)
    spec, config, fresh = kernel("descriptors-offsets")
    binaries.write(fresh, spec, config)
    left = {path.name for path in stored.parent.iterdir()}
    assert stored.name in left
    assert f"3{binaries.SUFFIX}" not in left
    assert f"2{binaries.SUFFIX}" not in left
    assert sum(path.stat().st_size for path in stored.parent.iterdir()) <= binaries.MOST_BYTES
    monkeypatch.setattr(binaries, "LARGEST_BYTES", 1000)
    stored.unlink()
    binaries.write(FRESH, SPEC, CONFIG)
    assert not stored.exists()


WRITER = """
import sys
from pathlib import Path
from flashgen.launch import binaries
folder, letter = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    binaries._save(Path(folder) / "same.kernel", letter.encode() * 100_000)
"""


def test_several_processes_write_and_a_reader_sees_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "binaries"
    folder.mkdir()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), letter],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for letter in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if (folder / "same.kernel").exists():
            seen.add((folder / "same.kernel").read_bytes())
    assert [writer.communicate() for writer in writers] == [("", None), ("", None)]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {b"a" * 100_000, b"b" * 100_000}
    assert [path.name for path in folder.iterdir()] == ["same.kernel"]


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "config", "target"),
    [
        (replace(SPEC, causal=not SPEC.causal), CONFIG, "h200"),
        (replace(SPEC, aligned16=False), CONFIG, "h200"),
        (SPEC, CONFIG.replace(num_warps=4 if CONFIG["num_warps"] == 8 else 8), "h200"),
        (SPEC, Config(family="hopper_forward", knobs=CONFIG.knobs), "h200"),
        (SPEC, CONFIG, "b200"),
    ],
)
def test_what_is_asked_for_makes_the_key(key: str, spec: Specialization, config: Config, target: str) -> None:
    other = keys.build_key(spec, config, find_device(target))
    assert other is not None
    assert other != key
    assert keys.build_key(replace(SPEC), CONFIG, find_device("h100")) == key


def test_every_version_makes_another_key(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = keys._compiler()
    assert compiler is not None
    seen = {key}
    for name, value in (
        ("_compiler", ("3.99.0", compiler[1])),
        ("_compiler", (compiler[0], "other files")),
        ("_sources", "other templates"),
        ("FORMAT", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, value if name == "FORMAT" else lambda value=value: value)
            seen.add(str(keys.build_key(SPEC, CONFIG, H200)))
    tool = tmp_path / "ptxas"
    for content in ("", "another"):
        tool.write_text(content)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
        seen.add(str(keys.build_key(SPEC, CONFIG, H200)))
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    seen.add(str(keys.build_key(SPEC, CONFIG, H200)))
    assert len(seen) == 8
    assert "None" not in seen


def test_a_changed_template_or_generator_makes_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    monkeypatch.setattr(keys, "shipped", lambda name: tmp_path)
    for name, content in (("a.py.jinja", "x"), ("a.py.jinja", "y"), ("b/a.py.jinja", "y"), ("README.md", "no source")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        seen.add(keys._sources.__wrapped__())
    assert len(seen) == 3


def test_places_of_files_do_not_make_the_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "0")
    monkeypatch.delenv("TRITON_ALWAYS_COMPILE")
    assert keys.build_key(SPEC, CONFIG, H200) == key


@pytest.mark.parametrize("variable", keys.ALWAYS_COMPILE)
def test_nothing_is_kept_while_the_compiler_is_watched(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert keys.build_key(SPEC, CONFIG, H200) is None
    binaries.write(FRESH, SPEC, CONFIG)
    assert not (settings().cache_dir / binaries.FOLDER).exists()
    assert read() is None


def test_nothing_is_kept_under_a_hook_or_with_functions_or_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    function = UserFunction(name="double", source="def double(score, b, h, q, k):\n    return other(score)\n")
    assert keys.build_key(replace(SPEC, mods=ScoreMods(score_mod=function)), CONFIG, H200) is None
    assert keys.build_key(SPEC, CONFIG, find_device("mi300x")) is None
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *asked: None)
    assert keys.build_key(SPEC, CONFIG, H200) is None


def test_a_kernel_that_triton_has_to_launch_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "known_layout", lambda part: None)
    binaries.write(FRESH, SPEC, CONFIG)
    assert not (settings().cache_dir / binaries.FOLDER).exists()
    monkeypatch.undo()


def test_a_stored_kernel_of_another_layout_is_not_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() is not None
    monkeypatch.setattr(binaries, "known_layout", lambda part: None)
    assert read() is None
