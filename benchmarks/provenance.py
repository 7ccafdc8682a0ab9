"""What stands in every row of a results file: the device, the software, the commit and the day."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.results import RESULTS, Row
from benchmarks.suites import work_of
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.launch.gpu import current_device
from flashgen.measure import gpu

ROOT = Path(__file__).resolve().parents[1]
COMMIT_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The part of a row that all rows of a run share; `slug` names the folder of the device."""

    device: str
    slug: str
    torch: str
    triton: str
    commit: str

    @classmethod
    def here(cls, commit: str | None = None) -> Provenance:
        """This process on its first GPU.

        Args:
            commit: what is measured; None asks git.

        Raises:
            DeviceError: torch sees no GPU.
            ValueError: the commit is not given and not known.
        """
        device, versions = current_device(), gpu.versions()
        commit = _short(commit) if commit else commit_of(ROOT)
        return cls(device=device.name, slug=device.slug, torch=torch.__version__, triton=versions.triton, commit=commit)

    def row(
        self,
        suite: str,
        workload: Workload,
        impl: str,
        version: str,
        *,
        median_ms: float | None = None,
        extra_bytes: int | None = None,
        outcome: str = "",
        timing: str = "",
        data: str = "",
        rates: bool = True,
    ) -> Row:
        """A row of today; with `rates`, its TFLOP/s and its GB/s (fewest bytes that the workload can move)."""
        timed = median_ms if rates else None
        flops, moved = work_of(suite, workload)
        return Row(
            suite=suite,
            workload=workload.key,
            data=data,
            impl=impl,
            impl_version=version,
            extra_bytes=extra_bytes,
            outcome=outcome,
            timing=timing,
            median_ms=median_ms,
            tflops=flops / timed / 1e9 if timed else None,
            gbps=moved / timed / 1e6 if timed else None,
            device=self.device,
            torch=self.torch,
            triton=self.triton,
            commit=self.commit,
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        )


def commit_of(root: Path) -> str:
    """The commit of a checkout, with `-dirty` behind it if files differ from it (what the results give aside).

    Raises:
        ValueError: there is no git, or `root` is not a checkout.
    """
    try:
        commit = _git(root, "rev-parse", f"--short={COMMIT_DIGITS}", "HEAD")
        pages = ("README.md", "docs/benchmarks.md", "docs/attention.md", "docs/models.md")
        generated = ("benchmarks/results", "docs/img", *pages)
        others = (".", *(f":(exclude){path}" for path in generated))
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *others)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"rows name their commit; {root} is no git checkout, so give it with --commit") from error
    return f"{commit}-dirty" if changed else commit


def _short(commit: str) -> str:
    return commit[:COMMIT_DIGITS] if re.fullmatch(r"[0-9a-f]{40}", commit) else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    add_results_arguments(parser)
    parser.add_argument("--append", action="store_true", help="go on with the file and skip what this commit has")


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    """Where rows go, and what is measured."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git to ask")


def add_shard_argument(
    parser: argparse.ArgumentParser,
    into: str = "a --results folder of its own, which python -m benchmarks.merge puts together",
) -> None:
    """The option of workloads that several GPUs share; `into` says where each has what it writes."""
    parser.add_argument(
        "--shard",
        default="0/1",
        metavar="I/N",
        help=f"every n-th workload from the i-th on, counted from 0; each shard into {into} (default: all)",
    )


def add_db_argument(parser: argparse.ArgumentParser) -> None:
    """The option of what `serve_generated` serves."""
    parser.add_argument("--db", type=Path, help="tuning database above the shipped ones (default: the shipped alone)")


def serve_generated(db: Path | None, scratch: Path) -> None:
    """Let `flashgen.attention` serve generated kernels only, from `db` or else from the shipped databases alone.

    Args:
        db: a tuning database above the shipped ones.
        scratch: a folder in which a file may be named that does not exist.
    """
    os.environ["FLASHGEN_POLICY"] = "generated"
    os.environ["FLASHGEN_DB"] = str(db or scratch / "none.sqlite3")
    settings.cache_clear()
