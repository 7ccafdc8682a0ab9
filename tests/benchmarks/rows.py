"""Rows of a device that does not exist, for tests."""

from __future__ import annotations

from pathlib import Path

from benchmarks.memory import memory_grid, speedup_grid
from benchmarks.provenance import Provenance
from benchmarks.results import MEMORY_COLUMNS, ResultsFile, Row
from benchmarks.suites import paper_grid
from flashgen.core.workload import Workload

SHARED = Provenance(device="Test GPU", slug="test_gpu", torch="2.11.0", triton="3.6.0", commit="0123456789ab")
DATE = "2026-11-20"
SPEED = {"flashgen": 440.0, "sdpa-flash": 330.0, "sdpa-cudnn": 550.0, "flex": 400.0, "fa3": 600.0, "standard": 55.0}


def row(workload: Workload, impl: str, tflops: float, *, suite: str = "forward", commit: str = SHARED.commit) -> Row:
    """A row at a given speed, on a fixed day."""
    ms = workload.flops / tflops / 1e9
    return Row(
        suite=suite,
        workload=workload.key,
        impl=impl,
        impl_version="1.0",
        median_ms=ms,
        tflops=tflops,
        gbps=workload.bytes / ms / 1e6,
        device=SHARED.device,
        torch=SHARED.torch,
        triton=SHARED.triton,
        commit=commit,
        date=DATE,
    )


def memory_row(workload: Workload, impl: str, extra_bytes: int) -> Row:
    """A row of the memory suite."""
    return Row(
        suite="memory",
        workload=workload.key,
        impl=impl,
        impl_version="1.0",
        extra_bytes=extra_bytes,
        device=SHARED.device,
        torch=SHARED.torch,
        triton=SHARED.triton,
        commit=SHARED.commit,
        date=DATE,
    )


def write_results(results: Path) -> None:
    """All three files of one device: every workload of the grid, FA3 missing on one of them."""
    folder = results / SHARED.slug
    forward = ResultsFile(folder / "forward.csv")
    for number, workload in enumerate(paper_grid()):
        forward.write(row(workload, impl, speed + number) for impl, speed in SPEED.items() if number or impl != "fa3")
    memory = ResultsFile(folder / "memory.csv", MEMORY_COLUMNS)
    for workload in memory_grid():
        s = workload.seqlen_k
        sizes = {"flashgen": 0, "flashgen-lse": 64 * s, "sdpa-flash": 64 * s + 1024, "standard": 64 * s * s}
        memory.write(
            memory_row(workload, impl, size) for impl, size in sizes.items() if impl != "standard" or s <= 32768
        )
    for workload in speedup_grid():
        memory.write(row(workload, impl, SPEED[impl], suite="speedup") for impl in ("flashgen", "standard"))
    overhead = ResultsFile(folder / "overhead.csv")
    small = Workload(batch=1, nheads=8, seqlen_q=128, head_dim=128, causal=True)
    for impl in ("sdpa-flash", "flashgen/same-pointers/pointer", "flashgen/same-pointers/descriptor"):
        overhead.write([row(small, impl, 1.5, suite="overhead")])
