"""The first call of a process: torch is imported, CUDA is up and the tensors are there; nothing of attention is.

With warm caches an earlier process has made the same call; with cold ones neither flashgen nor Triton finds a file of
theirs. What Python has compiled of its own modules is there either way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.impls import cudnn_version
from benchmarks.overhead_cases import SMALL, Arguments, Case
from flashgen._version import __version__

ROOT = Path(__file__).resolve().parents[1]
WARM, COLD = "flashgen/first-call/warm", "flashgen/first-call/cold"
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
        if name == COLD:
            return [_time_ms(name, Path(folder) / str(number)) for number in range(processes)]
        _time_ms(name, Path(folder))  # which fills the caches, those of Python's modules included
        return [_time_ms(name, Path(folder)) for _ in range(processes)]


def _time_ms(name: str, caches: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call_worker", name.split("/", maxsplit=1)[0], *map(str, SHAPE)],
        cwd=ROOT,
        env={
            **os.environ,
            "FLASHGEN_CACHE_DIR": str(caches / "flashgen"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "FLASHGEN_QUIET": "1",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return float(done.stdout.split()[-1])
