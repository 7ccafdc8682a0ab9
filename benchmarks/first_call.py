"""The first call of a process: torch is imported, CUDA is up and the tensors are there; nothing of attention is.

With warm caches an earlier process has made the same call; with cold ones neither flashgen nor Triton finds a file of
theirs. From a bundle no process has made the call, and nothing could compile its kernel: there is neither a file in the
caches but what `flashgen db import --with-binaries` put there, nor Triton, nor a program in PATH. The bytecode of
modules is there in any case, as installers leave it, and in a folder of its own: some hosts keep none, and there a call
takes twice as long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.first_call_worker import WITHOUT_COMPILER
from benchmarks.impls import cudnn_version
from benchmarks.overhead_cases import HOPPER, SMALL, Arguments, Case, config_of
from flashgen._version import __version__
from flashgen.core.device import Device
from flashgen.core.record import Measurement, TuningRecord
from flashgen.db.store import Store
from flashgen.launch.gpu import current_device

ROOT = Path(__file__).resolve().parents[1]
WARM, COLD, BUNDLE = (f"flashgen/first-call/{how}" for how in ("warm", "cold", "bundle"))
TIMEOUT_S = 120
SHAPE = (SMALL.batch, SMALL.nheads, SMALL.seqlen_q, SMALL.head_dim)


def _not_here(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    raise AssertionError("a first call is made in a process of its own")


def _no_tensors(loop: int, calls: int) -> Sequence[Arguments]:
    return []


CASES = tuple(
    Case(name=name, version=version, call=_not_here, arguments=_no_tensors)
    for name, version in (
        (WARM, __version__),
        (COLD, __version__),
        (BUNDLE, __version__),
        ("sdpa-flash/first-call", torch.__version__),
        ("sdpa-cudnn/first-call", cudnn_version()),
    )
)


def times_ms(name: str, processes: int) -> list[float]:
    """The first call of a case in some processes, one after the other.

    Raises:
        subprocess.CalledProcessError: a process fails; its `stderr` says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        bytecode = {"PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")}
        if name == COLD:
            return [_time_ms(name, Path(folder) / str(number), bytecode) for number in range(processes + 1)][1:]
        beside = bytecode | (_bundled(Path(folder), current_device()) if name == BUNDLE else {})
        return [_time_ms(name, Path(folder), beside) for _ in range(processes + 1)][1:]  # the first fills what is kept


def _bundled(folder: Path, device: Device) -> dict[str, str]:
    """Export the record and the kernel of the shape, take over both, and return what calls from there run under."""
    config = config_of(HOPPER, device) or config_of("descriptor", device)
    assert config is not None
    with Store.open(folder / "tuned.sqlite3") as store:
        measured = Measurement(times_ms=(1.0,))
        store.put_record(
            TuningRecord(workload=SMALL, device=device, config=config, provenance="measured", measurement=measured)
        )
    given, taken, nothing = folder / "given.sqlite3", folder / "taken.sqlite3", folder / "nothing"
    nothing.mkdir()
    export = [sys.executable, "-m", "flashgen", "db", "export", str(given), "--with-binaries", "--jobs", "1"]
    _run(export, folder / "maker", {"FLASHGEN_DB": str(folder / "tuned.sqlite3")})
    beside = {"FLASHGEN_DB": str(taken)}
    _run([sys.executable, "-m", "flashgen", "db", "import", str(given), "--with-binaries"], folder, beside)
    alone = {"FLASHGEN_BINARIES": "trusted", "FLASHGEN_NO_COMPILE": "1", "FLASHGEN_POLICY": "generated"}
    return beside | alone | {"PATH": str(nothing)}


def _time_ms(name: str, caches: Path, beside: dict[str, str]) -> float:
    impl = WITHOUT_COMPILER if name == BUNDLE else name.split("/", maxsplit=1)[0]
    command = [sys.executable, "-m", "benchmarks.first_call_worker", impl, *map(str, SHAPE)]
    return float(_run(command, caches, beside).split()[-1])


def _run(command: list[str], caches: Path, beside: dict[str, str]) -> str:
    """What a process prints whose caches lie in a folder; those of bundles have no other variables of Triton's."""
    left_out = ("TRITON_", "PYTHONDONTWRITE") if "FLASHGEN_DB" in beside else ("PYTHONDONTWRITE",)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    own = {"FLASHGEN_CACHE_DIR": str(caches / "flashgen"), "TRITON_CACHE_DIR": str(caches / "triton")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, **own, "FLASHGEN_QUIET": "1", **beside},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout
