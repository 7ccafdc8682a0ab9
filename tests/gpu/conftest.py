"""Where GPU tests run, what serves there, and what they leave behind: a mode of torch's, or no CUDA context at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.codegen import families, head_packing
from flashgen.codegen.hopper_forward import shares
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.runtime.lookup import packed_ladder, records
from flashgen.runtime.ops import kernel_cache

REPORT_S = 1.0
"""What a worker needs to send the report of its last test."""

Serve = Callable[..., None]


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


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's database of the test's own, which calls read, too."""
    path = tmp_path / "user.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", str(path))
    settings.cache_clear()
    flashgen.reload()
    yield path
    monkeypatch.undo()
    flashgen.reload()


@pytest.fixture
def served_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """What has a config of the Hopper family serve every forward call, without a record."""
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    monkeypatch.setattr(records.Records, "_of_class", lambda *_: ())
    monkeypatch.setattr(kernel_cache, "KERNELS", {})  # other tests of this process have kernels of other families there

    def serve_by(**changes: KnobValue) -> None:
        def default(spec: Specialization, device: Device, only: tuple[str, ...] = ()) -> Config:
            if spec.direction != "forward":
                return families.default_config(spec, device, only)
            usual = HOPPER_FORWARD.default(spec, device)
            found = usual.replace(**changes)
            return found if HOPPER_FORWARD.invalid(spec, found, device) is None else usual

        monkeypatch.setattr(records, "default_config", default)
        number = 3 if changes.get("split_keys") else 1
        monkeypatch.setattr(shares, "_best", lambda *_: number)  # at any sizes
        if changes:
            monkeypatch.setattr(packed_ladder, "balanced", lambda config, *_: config)
            # a pack may reach into the next group
            monkeypatch.setattr(head_packing, "as_group_allows", lambda _, heads: heads)
        flashgen.reload()

    serve_by()
    yield serve_by
    monkeypatch.undo()
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
