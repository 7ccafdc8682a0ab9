"""Rendered text to an imported module: what is executed is the text in memory, and no file or bytecode is read.

A copy is written for people, debuggers and profilers, which ask for the file that a kernel's lines are in.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import sys
from pathlib import Path
from types import ModuleType

from flashgen.codegen.render import KernelSource
from flashgen.core.folders import write_whole
from flashgen.core.settings import cache_folder, settings

PACKAGE = "flashgen_generated"
FOLDER = "kernels"


def load_module(source: KernelSource) -> ModuleType:
    """Import a rendered kernel; equal texts are one module."""
    return _load(source.module, source.text)


@functools.lru_cache(maxsize=4096)
def _load(name: str, text: str) -> ModuleType:
    path = str(_copy(name, text))
    module = ModuleType(f"{PACKAGE}.{name}")
    module.__file__ = path
    # Triton reads the source of a function through this cache; without a time the entry is never compared with a file
    linecache.cache[path] = (len(text), None, io.StringIO(text).readlines(), path)
    sys.modules[module.__name__] = module
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _copy(name: str, text: str) -> Path:
    """Where a copy of the text lies, or would lie: it is written if that is possible, and nothing depends on it."""
    path = settings().cache_dir / FOLDER / f"{name}.py"
    with contextlib.suppress(OSError):
        path = cache_folder(FOLDER) / path.name
        if not path.is_file() or path.read_bytes() != text.encode():
            write_whole(path, text.encode())
    return path
