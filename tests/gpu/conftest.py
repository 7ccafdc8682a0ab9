"""Where GPU tests run, and what they leave behind in their process: a mode of torch's, or no CUDA context at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

import flashgen

REPORT_S = 1.0
"""What a worker needs to send the report of its last test."""


def in_turns(worker: str, gpus: Sequence[str]) -> str:
    """`CUDA_VISIBLE_DEVICES` of a worker of pytest-xdist: all GPUs, so that workers take turns in having one first."""
    first = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join([*gpus[first:], *gpus[:first]])


def _use_all_gpus() -> None:
    """Before CUDA is up, which reads the variable once; this asks the driver alone for the number of GPUs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    if worker and visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = in_turns(worker, visible.split(","))


_use_all_gpus()


@pytest.fixture
def generated_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generated kernels only, and nothing remembered from another test's database."""
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Iterator[None]:
    """A test that forbids waiting and fails must not have the next ones fail with it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def pytest_runtest_logfinish(nodeid: str) -> None:
    """End a process whose context a kernel's fault has ended: every later test in it would fail, whatever it tests.

    pytest-xdist starts another worker in its place.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the CUDA context is lost since {nodeid}: {error}", returncode=1)
        time.sleep(REPORT_S)
        os._exit(1)
