"""`doctor`: whether this machine is ready to tune and to serve, and what is missing where it is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashgen._version import __version__
from flashgen.cli import arguments, output
from flashgen.cli.arguments import Json
from flashgen.core.errors import FlashgenError, SettingError
from flashgen.core.names import meant
from flashgen.core.settings import VARIABLES, settings, triton_cache, unknown_variables

if TYPE_CHECKING:
    from flashgen.core.device import Device
    from flashgen.core.record import TuningRecord

OLDEST_TORCH = (2, 11)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)

OTHER_PACKAGES: dict[str, tuple[int, ...]] = {
    "jinja2": (3, 1),
    "optuna": (5,),
    "sqlalchemy": (2,),
    "alembic": (1, 13),
    "typer": (0, 20),
    "rich": (13,),
    "platformdirs": (4,),
    "pyyaml": (6,),
}
"""What flashgen needs beside torch and Triton, and the oldest versions of it, as in pyproject.toml."""

IMPORT_S = 120
"""Seconds after which an import, from a network file system at worst, does not end any more."""

NVML = "nvidia-ml-py"
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
    installed, detail = _version("flashgen"), f"{__version__}, Python {platform.python_version()}"
    if installed in ("", __version__):  # empty where a checkout is run that is not installed
        yield Check(name="flashgen", state="ok", detail=detail)
    else:
        yield Check(name="flashgen", state="note", detail=f"{detail}; installed is {installed}: install it again")
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
    for name in unknown_variables():
        yield Check(name=name, state="note", detail=f"no variable of flashgen's{meant(name, VARIABLES)}")
    found = settings()
    if found.no_compile:
        yield Check(name="FLASHGEN_NO_COMPILE", state="note", detail="1: a call whose kernel is not ready is an error")
    if found.signatures and found.trusted_keys is None:
        detail = "required, and FLASHGEN_TRUSTED_KEYS names no key: no database or bundle of others is used"
        yield Check(name="FLASHGEN_SIGNATURES", state="note", detail=detail)
    if found.trusted_keys is not None and not os.access(found.trusted_keys, os.R_OK):
        yield Check(name="FLASHGEN_TRUSTED_KEYS", state="bad", detail=f"{found.trusted_keys} cannot be read")
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
        detail = f"none that torch can use{_why_no_gpu(torch.version)}: `--target` compiles and ranks for one elsewhere"
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


def _why_no_gpu(torch_version: Any) -> str:
    from flashgen.measure import gpu

    if torch_version.cuda is None and torch_version.hip is None:
        return " (this torch is built for CPUs)"
    names = gpu.gpus_of_driver()
    if not names:
        return ""
    needs = f"CUDA {torch_version.cuda}" if torch_version.cuda else f"ROCm {torch_version.hip}"
    hidden = "; CUDA_VISIBLE_DEVICES may hide it, or the driver may be older than this torch needs"
    return f" (driver {gpu.driver_version() or 'unknown'} has {', '.join(names)}, torch is built for {needs}{hidden})"


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
            detail = f"{counts['records']} records, {counts['trials']} tried configs: {layer.store.path}"
            name = f"database {layer.name}" if layer.name.startswith((PACKAGED, SHIPPED)) else "database"
            yield Check(name=name, state="ok", detail=detail)
        for path in settings().db_layers[1:]:
            if not path.exists():
                yield Check(name="database", state="note", detail=f"{path} is not there: FLASHGEN_DB names it in vain")
        if first.is_symlink() and not first.exists():
            yield Check(name="database", state="bad", detail=f"{first} is a link that leads nowhere")
        elif not _is_writable(first):
            detail = f"{first} cannot be written: tuning could store nothing"
            yield Check(name="database", state="note", detail=detail)
        elif not first.exists():
            yield Check(name="database", state="ok", detail=f"{first} will be made by the first tuning")
        here = arguments.device_here()
        if here is not None:
            yield from _records_of(here, [record for record, _ in layers.records(device=here, provenance="measured")])


def _records_of(here: Device, records: Sequence[TuningRecord]) -> Iterator[Check]:
    if not records:
        detail = f"none for {here.name}: `flashgen tune` makes them, until then nearest or default configs serve"
        yield Check(name="records", state="note", detail=detail)
    triton = _numbers(_version("triton"))
    others = {record.versions.triton for record in records if _numbers(record.versions.triton) not in ((), triton)}
    if others and triton:
        detail = f"measured with Triton {', '.join(sorted(others))}: `flashgen db verify --retime` measures some again"
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
    elif _is_writable(usual) and not usual.is_file():
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
    death = _death(module)
    if death:
        sys.modules[module] = None  # type: ignore[assignment] # for whoever imports it later: an exception, not the end
        return Check(name=name or module, state="bad", detail=f"{version} ends the process that imports it: {death}")
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a library that it was built against may be missing
        detail = f"{version} cannot be imported: {' '.join(str(error).split())}"
        return Check(name=name or module, state="bad", detail=detail)
    return None


def _death(module: str) -> str:
    """How a process ends that imports a module, if that is no exception: a library can abort it, or never return."""
    if module in sys.modules or not sys.executable:
        return ""
    line = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it was not done after {IMPORT_S} s"
    except OSError:
        return ""  # no process can be started: what is imported here says more
    if done.returncode == 0 or "Traceback" in done.stderr:
        return ""
    said = " ".join(done.stderr.split()[-30:])
    return said or f"exit code {done.returncode}"


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
