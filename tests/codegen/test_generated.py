"""What is executed is the rendered text: no file, link or bytecode that somebody planted, and none is needed."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import marshal
import os
import py_compile
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen import generated
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import KernelSource, render
from flashgen.core.device import find_device
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization

ROOT = Path(__file__).resolve().parents[2]
SOURCE = KernelSource(entry="toy", text="WHO = 'flashgen'\n\n\ndef who():\n    return WHO\n")
PLANTED = "WHO = 'somebody'\n\n\ndef who():\n    return WHO\n"


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    generated._load.cache_clear()
    yield
    generated._load.cache_clear()


def path() -> Path:
    return settings().cache_dir / generated.FOLDER / f"{SOURCE.module}.py"


def bytecode(flags: int) -> bytes:
    """Another module's bytecode that Python takes for that of the rendered text: unchecked, by hash or by time."""
    text = SOURCE.text.encode()
    head = importlib.util.MAGIC_NUMBER + struct.pack("<I", flags)
    if flags:
        head += importlib.util.source_hash(text)
    else:
        head += struct.pack("<II", int(path().stat().st_mtime), len(text))
    return head + marshal.dumps(compile(PLANTED, str(path()), "exec"))


@pytest.mark.parametrize("flags", [0b01, 0b11, 0b00], ids=["unchecked", "hash", "time"])
def test_planted_bytecode_is_not_executed(flags: int) -> None:
    path().parent.mkdir(parents=True)
    path().write_text(SOURCE.text)
    cached = Path(importlib.util.cache_from_source(str(path())))
    cached.parent.mkdir()
    cached.write_bytes(bytecode(flags))
    assert _imported_as_python_does(path()) == "somebody", "the attack works on Python's own loader"
    assert load_module(SOURCE).who() == "flashgen"


def _imported_as_python_does(file: Path) -> str:
    spec = importlib.util.spec_from_file_location("attacked", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str = module.who()
    return found


def test_no_bytecode_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    load_module(SOURCE)
    assert [each.name for each in path().parent.iterdir()] == [path().name]


def _other_text() -> None:
    path().write_text(PLANTED)


def _link() -> None:
    target = path().parent.parent / "target.py"
    target.write_text(PLANTED)
    path().symlink_to(target)


def _fifo() -> None:
    os.mkfifo(path())


def _folder() -> None:
    path().mkdir()


@pytest.mark.parametrize("plant", [_other_text, _link, _fifo, _folder])
def test_a_planted_file_is_not_executed(plant: Callable[[], None]) -> None:
    path().parent.mkdir(parents=True)
    plant()
    module = load_module(SOURCE)
    assert module.who() == "flashgen"
    assert inspect.getsource(module.who) == "def who():\n    return WHO\n"
    if plant is not _folder:
        assert path().read_text() == SOURCE.text


def test_a_file_that_is_changed_after_the_import_is_not_read() -> None:
    module = load_module(SOURCE)
    path().write_text(PLANTED.replace("return WHO", "return 'another'"))
    linecache.checkcache()
    assert inspect.getsource(module.who) == "def who():\n    return WHO\n"
    assert load_module(SOURCE).who() == "flashgen"


def test_a_module_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*asked: object, **rest: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    module = load_module(SOURCE)
    assert not path().exists()
    assert (module.who(), inspect.getsource(module.who)) == ("flashgen", "def who():\n    return WHO\n")


def test_a_full_disk_leaves_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*asked: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert load_module(SOURCE).who() == "flashgen"
    assert list(path().parent.iterdir()) == []


def test_tracebacks_and_lines_are_those_of_the_text() -> None:
    source = KernelSource(entry="toy", text="# é\x0c one line\n\n\ndef fails():\n    raise KeyError\n")
    module = load_module(source)
    with pytest.raises(KeyError) as caught:
        module.fails()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == (str(module.__file__), 5, "raise KeyError")


def test_triton_compiles_the_text_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reads the source of a function, through `inspect`; a file with another kernel is beside it all the while."""

    spec, device = Specialization.parse("fwd-bf16-d64"), find_device("a100")
    config = PORTABLE_FORWARD.default(spec, device)
    source = render(spec, config)
    folder = settings().cache_dir / generated.FOLDER
    folder.mkdir(parents=True)
    planted = folder / f"{source.module}.py"
    monkeypatch.setattr(generated, "write_whole", lambda path, content: path.write_text("import os\n" * 1000))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")  # as it is for users
    found: Any = compile_kernel(spec, config, device).handle
    assert planted.read_text().startswith("import os\n")
    function = getattr(load_module(source), source.entry)
    assert function.src in source.text
    assert f"{source.module}.py" in found.asm["ptx"], "its lines are in a file that people can look for"


CHILD = """
import sys
from flashgen.codegen.generated import load_module
from flashgen.codegen.render import KernelSource
print(load_module(KernelSource(entry="toy", text=sys.argv[1])).who())
"""


def test_bytecode_of_an_earlier_process_is_not_executed(own_settings: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, SOURCE.text], capture_output=True, text=True, env=environment, check=True
        )
        assert done.stdout == "flashgen\n"
        evil = path().with_name("evil.py")
        evil.write_text(PLANTED)
        py_compile.compile(
            str(evil),
            cfile=importlib.util.cache_from_source(str(path())),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
