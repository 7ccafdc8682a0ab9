"""`devices` and `doctor`: which GPUs are known, and whether this machine is ready to tune and to serve."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import typer

from flashgen._version import __version__
from flashgen.cli import arguments, output
from flashgen.cli.arguments import Json
from flashgen.core.device import CATALOGUE, Device
from flashgen.core.settings import settings

OLDEST_TORCH = (2, 11)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)


def devices(json: Json = False) -> None:
    """List the known GPUs; the one of this machine is marked. Any name in the list is a --target."""
    here = arguments.device_here()
    known = [*CATALOGUE]
    if here is not None and here.identity not in {device.identity for device in CATALOGUE}:
        known.append(here)
    if json:
        output.print_json(
            [{**asdict(device), "identity": device.identity, "here": device_is(here, device)} for device in known]
        )
        return
    columns = ("", "name", "identity", "SMs", "memory GB", "smem KB a block", "L2 MB", "GB/s", "bf16 TFLOP/s")
    output.print_table(columns, [_device_row(device, device_is(here, device)) for device in known])
    if here is None:
        output.note("torch sees no GPU here")


def device_is(here: Device | None, device: Device) -> bool:
    """Whether `device` is the GPU of this machine, by its identity."""
    return here is not None and here.identity == device.identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `doctor`: `ok`, `note` (works, but), or `bad` (does not work)."""

    name: str
    state: str
    detail: str


def doctor(json: Json = False) -> None:
    """Check versions, GPU, databases and directories; exit code 1 if something does not work."""
    checks = [*_software(), *_gpu(), *_databases(), *_directories()]
    if json:
        output.print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            typer.echo(f"{check.state:4}  {check.name.ljust(width)}  {check.detail}")
    if any(check.state == "bad" for check in checks):
        raise typer.Exit(1)


def _device_row(device: Device, here: bool) -> tuple[output.Cell, ...]:
    return (
        "*" if here else "",
        device.name,
        device.identity,
        device.num_sms,
        device.memory_gb,
        device.smem_per_block // 1024,
        device.l2_bytes // 2**20,
        device.bandwidth_gbs or None,
        device.peak_tflops or None,
    )


def _software() -> Iterator[Check]:
    yield Check(name="flashgen", state="ok", detail=f"{__version__}, Python {platform.python_version()}")
    torch = _version("torch")
    state = "ok" if _numbers(torch) >= OLDEST_TORCH else "bad"
    yield Check(
        name="torch", state=state, detail=torch if state == "ok" else f"{torch or 'missing'}: 2.11 or newer is needed"
    )
    triton = _version("triton")
    if not triton:
        yield Check(name="triton", state="bad", detail="missing: nothing can be compiled without it")
    elif not OLDEST_TRITON <= _numbers(triton) <= NEWEST_TRITON:
        yield Check(name="triton", state="note", detail=f"{triton}: tested with 3.6 to 3.9")
    else:
        yield Check(name="triton", state="ok", detail=triton)


def _gpu() -> Iterator[Check]:
    from flashgen.measure import gpu

    here = arguments.device_here()
    if here is None:
        yield Check(
            name="GPU", state="note", detail="none that torch can use: `--target` compiles and ranks for one elsewhere"
        )
        return
    yield Check(name="GPU", state="ok", detail=f"{here.name} ({here.identity})")
    driver = gpu.driver_version()
    yield Check(
        name="driver",
        state="ok" if driver else "note",
        detail=driver or "unknown: without nvidia-ml-py there is no driver version, no clock and no warning of others",
    )
    others = gpu.other_processes()
    if others:
        detail = f"{', '.join(others)}: timings made now would be wrong"
        yield Check(name="GPU in use", state="note", detail=detail)


def _databases() -> Iterator[Check]:
    from flashgen.db.layers import Layers

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Layers.open() as layers:
            for layer in layers.layers:
                counts = layer.store.counts()
                detail = f"{counts['records']} records, {counts['trials']} trials: {layer.store.path}"
                yield Check(
                    name=f"database {layer.name}" if layer.name.startswith("shipped/") else "database",
                    state="ok",
                    detail=detail,
                )
            if layers.first_name not in {layer.name for layer in layers.layers}:
                yield Check(name="database", state="ok", detail=f"{layers.first_name} will be made by the first tuning")
            here = arguments.device_here()
            if here is not None and not layers.records(device=here, provenance="measured"):
                detail = (
                    f"none for {here.name}: `flashgen tune` makes them, until then nearest or default configs serve"
                )
                yield Check(name="records", state="note", detail=detail)
    for warning in caught:
        yield Check(name="database", state="bad", detail=str(warning.message))


def _directories() -> Iterator[Check]:
    folder = settings().cache_dir
    try:
        with tempfile.TemporaryFile(dir=folder):
            yield Check(name="cache", state="ok", detail=str(folder))
    except OSError as error:
        yield Check(name="cache", state="bad", detail=f"{folder} cannot be written: {error}")
    if settings().no_compile:
        yield Check(name="FLASHGEN_NO_COMPILE", state="note", detail="1: a call whose kernel is not ready is an error")
    if settings().policy != "fastest":
        yield Check(name="FLASHGEN_POLICY", state="note", detail=f"{settings().policy}: SDPA never serves")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number, e.g. (2, 11)."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())
