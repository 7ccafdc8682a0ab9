"""What GPU tests leave behind in their process: a mode of torch's, and after a fault no CUDA context at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

REPORT_S = 1.0
"""What a worker needs to send the report of its last test."""


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
