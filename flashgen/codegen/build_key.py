"""What a compiled kernel depends on, read without rendering, importing or compiling anything.

Equal keys mean equal machine code: a key has the contents of every file that renders kernels, the files of Triton and
of its ptxas, the variables that its compiler reads, and what is asked for. Triton's own key hashes half a gigabyte and
needs the rendered text; this one takes milliseconds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.settings import compiler_environment, shipped
from flashgen.core.workload import Specialization

if TYPE_CHECKING:
    from flashgen.codegen.helper import HelperKernel

FORMAT = 1
"""Raised when what is made of a key changes without any other file."""

ALWAYS_COMPILE = ("TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_OVERRIDE", "TRITON_KERNEL_DUMP", "TRITON_INTERPRET")
"""Variables that ask for more than a binary: no key holds while one is on."""

_COMPILER_PARTS = ("compiler", "language", "runtime", "experimental", "backends/nvidia", "_C")
_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


def build_key(spec: Specialization, config: Config, device: Device) -> str | None:
    """The key of a config's kernels, 64 hexadecimal digits, or None where nothing of them may be kept.

    That is so for a user's own functions, which may call others; for targets without binaries of NVIDIA; and while
    Triton's compiler is watched, changed or replaced.
    """
    return None if spec.mods is not None else _local_key(_of_config(spec, config), device)


def bundle_key(spec: Specialization, config: Config, device: Device, triton: str) -> str | None:
    """The key of a config's kernels on every machine where Triton `triton` compiles them as it comes.

    None where `build_key` is None for what is asked, and while a variable changes what the compiler does.
    """
    return None if spec.mods is not None else _shared_key(_of_config(spec, config), device, triton)


def helper_build_key(helper: HelperKernel, device: Device) -> str | None:
    """The same as `build_key` of a helper kernel."""
    return _local_key(_of_helper(helper), device)


def helper_bundle_key(helper: HelperKernel, device: Device, triton: str) -> str | None:
    """The same as `bundle_key` of a helper kernel."""
    return _shared_key(_of_helper(helper), device, triton)


def _of_config(spec: Specialization, config: Config) -> dict[str, object]:
    return {"specialization": asdict(spec), "family": config.family, "knobs": config.knobs}


def _of_helper(helper: HelperKernel) -> dict[str, object]:
    return {"helper": helper.id, "key": helper.key}


def _local_key(asked: dict[str, object], device: Device) -> str | None:
    environment = compiler_environment()
    if not device.is_nvidia or _is_watched(environment):
        return None
    compiler = _compiler()
    if compiler is None:
        return None
    return _digest(
        asked,
        device,
        compiler=compiler,
        environment=environment,
        tools=[_stamp(Path(value)) for name, value in environment.items() if name.endswith("_PATH")],
        python=sys.version_info[:2],
    )


def _shared_key(asked: dict[str, object], device: Device, triton: str) -> str | None:
    if not device.is_nvidia or compiler_environment() or _is_watched({}):
        return None
    return _digest(asked, device, bundled=triton)


def triton_version() -> str | None:
    """The version of the Triton that is installed, without importing it; None where there is none."""
    found = _compiler()
    return None if found is None else found[0]


def _digest(asked: dict[str, object], device: Device, **beside: object) -> str:
    whole = {
        "format": FORMAT,
        **asked,
        "target": [device.arch, device.warp_size],
        "sources": _sources(),
        **beside,
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _is_watched(environment: dict[str, str]) -> bool:
    if any(environment.get(name, "0") not in ("", "0") for name in ALWAYS_COMPILE):
        return True
    knobs = sys.modules.get("triton.knobs")  # not loaded: nobody can have set a hook
    return knobs is not None and getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None


@functools.cache
def _sources() -> str:
    """The digest of every file that a rendered text and the way it is compiled follow from."""
    package = Path(__file__).resolve().parent
    roots = {"templates": shipped("templates"), "codegen": package, "core": package.parent / "core"}
    digest = hashlib.sha256()
    for label, root in roots.items():
        for path in _files(root, (".py", ".jinja")):
            content = path.read_bytes()
            digest.update(f"{label}/{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@functools.cache
def _compiler() -> tuple[str, str] | None:
    """Triton's version, and a digest of the sizes and times of its files; None where it is not to be found."""
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    init = Path(found.origin)
    version = _VERSION.search(init.read_text())
    if version is None:
        return None
    digest = hashlib.sha256()
    for part in _COMPILER_PARTS:
        for path in _files(init.parent / part, (".py", ".so", ".bc", ""), deep=part != "_C"):
            digest.update(f"{path} {_stamp(path)}\n".encode())
    return version[1], digest.hexdigest()


def _stamp(path: Path) -> str:
    """Size and time of a file, empty for none."""
    try:
        seen = path.stat()
    except OSError:
        return ""
    return f"{seen.st_size} {seen.st_mtime_ns}"


def _files(root: Path, suffixes: tuple[str, ...], *, deep: bool = True) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if deep and name != "__pycache__")
        for name in sorted(names):
            if os.path.splitext(name)[1] in suffixes:
                yield Path(folder, name)
