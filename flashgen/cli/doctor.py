"""`doctor`: whether this machine is ready to tune and to serve, and what is missing where it is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from flashgen._version import __version__
from flashgen.cli import arguments, output
from flashgen.cli.arguments import Json
from flashgen.core.errors import FlashgenError, SettingError
from flashgen.core.settings import settings, triton_cache

OLDEST_TORCH = (2, 11)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)

OTHER_PACKAGES: dict[str, tuple[int, ...]] = {
    "jinja2": (3, 1),
    "optuna": (5,),
    "sqlalchemy": (2,),
    "alembic": (1, 13),
    "typer": (0, 15),
    "rich": (13,),
    "platformdirs": (4,),
    "pyyaml": (6,),
}
"""What flashgen needs beside torch and Triton, and the oldest versions of it, as in pyproject.toml."""

NVML, OLDEST_NVML = "nvidia-ml-py", (12,)
WITHOUT_NVML = "no driver version, no clock, and no warning of other processes on the GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `doctor`: `ok`, `note` (works, but), or `bad` (does not work)."""

    name: str
    state: str
    detail: str


def doctor(json: Json = False) -> None:
    """Check versions, GPU, databases and directories; exit code 1 if something does not work."""
    checks = [check for name, probe in PROBES.items() for check in _answers(name, probe)]
    if json:
        output.print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            output.say(f"{check.state:4}  {check.name.ljust(width)}  {check.detail}")
    if any(check.state == "bad" for check in checks):
        raise typer.Exit(1)


def _answers(name: str, probe: Callable[[], Iterator[Check]]) -> list[Check]:
    """The checks of one probe; one that cannot be made is a finding like others, and so is what it warns of."""
    found: list[Check] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found.extend(probe())
        except SettingError as error:
            first = name == "environment"
            detail = str(error) if first else "not checked while the environment is wrong"
            found.append(Check(name=name, state="bad" if first else "note", detail=detail))
        except Exception as error:  # noqa: BLE001 - whatever is broken here, the rest is looked at
            detail = str(error) if isinstance(error, FlashgenError) else f"{type(error).__name__}: {error}"
            found.append(Check(name=name, state="bad", detail=" ".join(detail.split())))
    state = "bad" if name == "database" else "note"  # a layer that is left out is told by a warning
    return found + [Check(name=name, state=state, detail=" ".join(str(each.message).split())) for each in caught]


def _software() -> Iterator[Check]:
    yield Check(name="flashgen", state="ok", detail=f"{__version__}, Python {platform.python_version()}")
    for package, oldest in OTHER_PACKAGES.items():
        version, wanted = _version(package), ".".join(map(str, oldest))
        if not version or _numbers(version) < oldest:
            yield Check(name=package, state="bad", detail=f"{version or 'missing'}: {wanted} or newer is needed")


def _torch() -> Iterator[Check]:
    version = _version("torch")
    if _numbers(version) < OLDEST_TORCH:
        yield Check(name="torch", state="bad", detail=f"{version or 'missing'}: 2.11 or newer is needed")
        return
    yield _imported("torch", version) or Check(name="torch", state="ok", detail=version)


def _triton() -> Iterator[Check]:
    version, own = _version("triton"), _triton_of_torch()
    if not version:
        yield Check(name="triton", state="bad", detail="missing: nothing can be compiled without it")
        return
    broken = _imported("triton", version)
    if broken is not None:
        yield broken
    elif not OLDEST_TRITON <= _numbers(version) <= NEWEST_TRITON:
        yield Check(name="triton", state="note", detail=f"{version}: tested with 3.6 to 3.9")
    elif own and _numbers(own) != _numbers(version):
        yield Check(name="triton", state="note", detail=f"{version}: torch {_version('torch')} was built for {own}")
    else:
        yield Check(name="triton", state="ok", detail=version)


def _environment() -> Iterator[Check]:
    found = settings()
    if found.no_compile:
        yield Check(name="FLASHGEN_NO_COMPILE", state="note", detail="1: a call whose kernel is not ready is an error")
    if found.policy != "fastest":
        yield Check(name="FLASHGEN_POLICY", state="note", detail=f"{found.policy}: SDPA never serves")


def _gpu() -> Iterator[Check]:
    try:
        import torch
    except ImportError:
        yield Check(name="GPU", state="note", detail="not checked without torch")
        return
    from flashgen.measure import gpu

    here = arguments.device_here()
    if here is None:
        is_for_cpus = torch.version.cuda is None and torch.version.hip is None
        why = " (this torch is built for CPUs)" if is_for_cpus else ""
        detail = f"none that torch can use{why}: `--target` compiles and ranks for one elsewhere"
        yield Check(name="GPU", state="note", detail=detail)
        return
    yield Check(name="GPU", state="ok", detail=f"{here.name} ({here.identity})")
    driver = gpu.driver_version()
    yield Check(name="driver", state="ok" if driver else "note", detail=driver or "unknown: NVML does not answer")
    others = gpu.other_processes()
    if others:
        detail = f"{', '.join(others)}: timings made now would be wrong"
        yield Check(name="GPU in use", state="note", detail=detail)
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield Check(name="C compiler", state="note", detail="none found, and Triton needs one to load its first kernel")


def _nvml() -> Iterator[Check]:
    version = _version(NVML)
    if not version:
        yield Check(name=NVML, state="note", detail=f"missing (pip install {NVML}): {WITHOUT_NVML}")
        return
    yield _imported("pynvml", version, name=NVML) or Check(name=NVML, state="ok", detail=version)


def _databases() -> Iterator[Check]:
    from flashgen.db.layers import PACKAGED, SHIPPED, Layers

    first = settings().db_layers[0]
    with Layers.open() as layers:
        for layer in layers.layers:
            counts = layer.store.counts()
            detail = f"{counts['records']} records, {counts['trials']} trials: {layer.store.path}"
            name = f"database {layer.name}" if layer.name.startswith((PACKAGED, SHIPPED)) else "database"
            yield Check(name=name, state="ok", detail=detail)
        if not _is_writable(first):
            detail = f"{first} cannot be written: tuning could store nothing"
            yield Check(name="database", state="note", detail=detail)
        elif not first.exists():
            yield Check(name="database", state="ok", detail=f"{first} will be made by the first tuning")
        here = arguments.device_here()
        if here is not None and not layers.records(device=here, provenance="measured"):
            detail = f"none for {here.name}: `flashgen tune` makes them, until then nearest or default configs serve"
            yield Check(name="records", state="note", detail=detail)


def _caches() -> Iterator[Check]:
    folder = settings().cache_dir
    try:
        with tempfile.TemporaryFile(dir=folder):
            yield Check(name="cache", state="ok", detail=str(folder))
    except OSError as error:
        yield Check(name="cache", state="bad", detail=f"{folder} cannot be written: {error}")
    try:
        from triton import knobs
    except ImportError:
        return
    instead, usual = triton_cache(), Path(knobs.cache.dir)
    if instead is not None:
        yield Check(name="Triton's cache", state="note", detail=f"{usual} cannot be written: {instead} is used")
    elif _is_writable(usual):
        yield Check(name="Triton's cache", state="ok", detail=str(usual))
    else:
        yield Check(name="Triton's cache", state="bad", detail=f"{usual} cannot be written (TRITON_CACHE_DIR)")


PROBES: dict[str, Callable[[], Iterator[Check]]] = {
    "flashgen": _software,
    "torch": _torch,
    "triton": _triton,
    "environment": _environment,
    "GPU": _gpu,
    NVML: _nvml,
    "database": _databases,
    "cache": _caches,
}
"""What is looked at, one after the other, whatever the others found."""


def _imported(module: str, version: str, *, name: str = "") -> Check | None:
    """What is wrong with a package that is installed but cannot be imported."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a library that it was built against may be missing
        detail = f"{version} cannot be imported: {' '.join(str(error).split())}"
        return Check(name=name or module, state="bad", detail=detail)
    return None


def _is_writable(path: Path) -> bool:
    """Whether a file or folder can be written, or made where it is not there yet."""
    if path.is_file() and not os.access(path, os.W_OK):
        return False
    folder = path if path.is_dir() else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package) or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _triton_of_torch() -> str:
    """The version of Triton that the installed torch asks for, empty if it names none."""
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = (re.match(r"triton\s*==\s*([\d.]+)", each) for each in wanted)
    return next((match[1] for match in found if match), "")


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number, e.g. (2, 11)."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())
