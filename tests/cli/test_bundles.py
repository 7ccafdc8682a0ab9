"""`flashgen db export` and `import` with `--with-binaries`: kernels beside the records, and only if asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli import arguments
from flashgen.cli import bundles as commands
from flashgen.cli.bundles import jobs_of
from flashgen.codegen.families import balanced, default_config
from flashgen.codegen.family import Sizes
from flashgen.codegen.helper import HelperKernel
from flashgen.codegen.usual_helpers import usual_helpers
from flashgen.core.device import Device, find_device
from flashgen.core.errors import BuildError
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.db.store import Store
from flashgen.launch import binaries, bundles
from tests.cli.conftest import Invoke
from tests.db.samples import H200, MEASURED, SHORT, timed
from tests.tiers import EXHAUSTIVE

pytest.importorskip("zstandard")


class OneProcess:
    """Compiles in this process."""

    def __init__(self, *asked: object, **named: object) -> None:
        pass

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *asked: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
        return map(function, jobs)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of a GPU whose kernels compile in a second."""
    monkeypatch.setattr(commands, "ProcessPoolExecutor", OneProcess)
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO")  # no bundle holds what a machine's own settings made
    a100 = find_device("a100")
    config = default_config(Specialization.of(SHORT), a100)
    path = settings().db_layers[0]
    with Store.open(path) as store:
        store.put_records([timed(MEASURED, 1.0, workload=SHORT, device=a100, config=config)])
    return path


def kept() -> list[Path]:
    return list((settings().cache_dir / binaries.BUNDLES).glob(f"*{binaries.SUFFIX}"))


@EXHAUSTIVE
def test_kernels_travel_beside_the_records(invoke: Invoke, tuned: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "tuned.sqlite3"
    done = invoke("db", "export", target, "--with-binaries", "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in target.parent.iterdir()) == ["tuned.csv", "tuned.kernels", "tuned.sqlite3"]
    assert "2 kernels for sm80 by Triton" in done.stdout
    assert invoke("db", "import", target).exit_code == 0
    assert kept() == [], "not asked for"
    refused = invoke("db", "import", target.with_suffix(".kernels"))
    assert refused.exit_code == 1
    assert "imported with --with-binaries" in refused.stderr
    for asked in (target, target.with_suffix(".kernels")):
        done = invoke("db", "import", asked, "--with-binaries")
        assert "2 kernels for sm80" in done.stdout
        assert "FLASHGEN_BINARIES=trusted" in done.stdout
        shared_and_alone = kept()
        assert len(shared_and_alone) == 2, "the record's, and where CTAs share keys"
        for found in shared_and_alone:
            found.unlink()


def test_a_bundle_for_another_gpu_than_this_one_is_refused(
    invoke: Invoke, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "tuned.sqlite3"
    invoke("db", "export", target, "--with-binaries")
    monkeypatch.setattr(arguments, "device_here", lambda: find_device("h200"))
    done = invoke("db", "import", target, "--with-binaries")
    assert done.exit_code == 1
    assert "is for the GPU that it is imported for, sm90" in done.stderr
    assert kept() == []


@pytest.mark.timeout(60)
def test_a_worker_ends_with_the_process_that_it_compiles_for() -> None:
    code = "import time; from flashgen.cli.bundles import _end_with; _end_with(1 << 30); time.sleep(50)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=40).returncode == 1


def test_of_records_that_are_refused_no_kernels_are_taken(invoke: Invoke, tuned: Path, tmp_path: Path) -> None:
    target = tmp_path / "tuned.sqlite3"
    invoke("db", "export", target, "--with-binaries")
    target.write_bytes(b"not a database" * 99)
    done = invoke("db", "import", target, "--with-binaries")
    assert (done.exit_code, "file is not a database" in done.stderr) == (1, True)
    assert kept() == []


def test_what_does_not_compile_is_said_and_left_out(
    invoke: Invoke, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*job: object) -> None:
        raise BuildError("ptxas is out of registers")

    monkeypatch.setattr(bundles, "entry_of", broken)
    done = invoke("db", "export", tmp_path / "tuned.sqlite3", "--with-binaries")
    assert done.exit_code == 1
    assert "left out: ptxas is out of registers" in done.stdout
    assert "a bundle needs kernels; none of 2 can be given away" in done.stderr
    assert not (tmp_path / "tuned.sqlite3").exists()


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_of_others_in_the_place_of_a_bundle_stays(
    invoke: Invoke, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    def asked(*job: object) -> None:
        raise AssertionError("nothing is compiled for a bundle that cannot be written")

    monkeypatch.setattr(bundles, "entry_of", asked)
    theirs = tmp_path / "tuned.kernels"
    theirs.mkdir() if is_folder else theirs.write_text("a list of operating systems")
    done = invoke("db", "export", tmp_path / "tuned.sqlite3", "--with-binaries")
    assert (done.exit_code, "takes the place of a bundle alone" in done.stderr) == (1, True)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tuned.")] == [theirs]
    assert is_folder or theirs.read_text() == "a list of operating systems"


def test_helpers_travel_where_they_are_asked_for(
    invoke: Invoke, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def entry(helper: HelperKernel, device: Device) -> bundles.Entry | None:
        asked.append((helper, device.arch))
        return None if helper.id == "merge_states" else bundles.Entry(key=f"{len(asked):064x}", content=b"kernel")

    monkeypatch.setattr(bundles, "entry_of_helper", entry)
    done = invoke("db", "export", tmp_path / "tuned.sqlite3", "--with-binaries", "--with-helpers")
    assert done.exit_code == 0, done.output
    assert asked == [(helper, "sm80") for helper in usual_helpers(Specialization.of(SHORT))]
    assert "9 kernels for sm80 by Triton" in done.stdout
    assert "left out: merge_states for " in done.stdout


def test_tiles_that_other_sizes_get_are_in_a_bundle() -> None:
    full = Workload.parse("b4-h16-s4096-d128")
    one_wave = Workload.parse("b1-h12-s1664-d128")
    config = default_config(full.specialization, H200)
    record = replace(MEASURED, workload=full, device=H200, config=config, baselines=())
    served = balanced(config, one_wave.specialization, Sizes.of(one_wave), H200)
    assert served != config
    assert {config, served} <= {each for _, each, _ in jobs_of([record])}
