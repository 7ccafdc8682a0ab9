"""Rows of a device that does not exist, for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import curves
from benchmarks.memory import memory_grid, tensors_bytes, training_grid
from benchmarks.provenance import Provenance
from benchmarks.results import DATA_COLUMNS, MEMORY_COLUMNS, TRAINING_COLUMNS, ResultsFile, Row
from benchmarks.speedup import speedup_grid
from benchmarks.suites import DATA_SUITE, FP16_SUITE, backward_grid, data_grid, fp16_grid, paper_grid
from benchmarks.training_tasks import TASKS
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS

SHARED = Provenance(device="Test GPU", slug="test_gpu", torch="2.11.0", triton="3.6.0", commit="0123456789ab")
DATE = "2026-11-20"
DISTANCES = {"sdpa-flash": 0.0, "sdpa-cudnn": 0.001, "flashgen": 0.002, "standard": 0.003}
"""Of losses in training from the reference's, in the mean over steps."""

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


def memory_row(workload: Workload, impl: str, extra_bytes: int, *, suite: str = "memory") -> Row:
    """A row of a memory suite."""
    return Row(
        suite=suite,
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
    # TFLOP/s: 33.8, 16.9 and 8.5 us
    speeds = {"sdpa-flash": 1.0, "flashgen/same-pointers/descriptor": 2.0, "flashgen/same-pointers/pointer": 4.0}
    overhead.write(row(small, impl, speed, suite="overhead") for impl, speed in speeds.items())


def write_data(results: Path) -> None:
    """data.csv: every workload on every kind, each slowing flashgen down; FA3 has no fp16."""
    file = ResultsFile(results / SHARED.slug / "data.csv", DATA_COLUMNS)
    for workload in data_grid():
        for kind, mine in zip(DATA_KINDS, (800.0, 600.0, 480.0, 360.0, 200.0), strict=True):
            speeds = {"flashgen": mine, "sdpa-cudnn": 500.0, "fa3": 400.0}
            rows = [row(workload, impl, speed, suite=DATA_SUITE) for impl, speed in speeds.items()]
            file.write(
                replace(each, data=kind, timing="graph")
                for each in rows
                if (workload.dtype, each.impl) != ("fp16", "fa3")
            )


def write_fp16(results: Path) -> None:
    """The grid in fp16 behind what forward.csv has; the wheel of FA3 has no fp16."""
    file = ResultsFile(results / SHARED.slug / "forward.csv", append=True)
    for workload in fp16_grid():
        file.write(row(workload, impl, speed, suite=FP16_SUITE) for impl, speed in SPEED.items() if impl != "fa3")


def write_training(results: Path) -> None:
    """The files of training: one shape of each race, both modes of GPT-2 (16k eager only), memory of both passes."""
    folder = results / SHARED.slug
    speeds = SPEED | {"flashgen-deterministic": 400.0, "fa4": 500.0}
    for suite in ("backward", "forward_backward"):
        rows = [row(backward_grid()[9], impl, speed, suite=suite) for impl, speed in speeds.items()]
        ResultsFile(folder / f"{suite}.csv").write(rows)
    training = ResultsFile(folder / "training.csv", TRAINING_COLUMNS)
    for suite, seqlen in (("training", 1024), ("training", 16384), ("training_compiled", 1024)):
        for impl, rate in {"sdpa-flash": 300e3, "sdpa-cudnn": 320e3, "flashgen": 400e3, "standard": 160e3}.items():
            one = training_row(suite, str(seqlen), impl, None if (impl, seqlen) == ("standard", 16384) else rate)
            training.write([one])
            if one.tokens_per_s:
                distance = DISTANCES[impl]
                curve = [9.0, 5.0 + 3 * distance, 3.0]
                curves.append(folder / "training_loss.csv", one.subject, SHARED.commit, curve)
    memory = ResultsFile(folder / "memory.csv", MEMORY_COLUMNS)
    for workload in training_grid()[1:3]:
        sizes = {"flashgen": 0, "standard": 8 * tensors_bytes(workload)}
        memory.write(memory_row(workload, impl, size, suite="training_memory") for impl, size in sizes.items())


def write_encoders(results: Path) -> None:
    """Rows and curves of 64k, BERT and the classifier, in the files of training: every attention of each task."""
    folder = results / SHARED.slug
    speeds = {"flashgen": 250e3, "sdpa-cudnn": 240e3, "sdpa": 230e3, "standard": 100e3}
    file = ResultsFile(folder / "training.csv", TRAINING_COLUMNS, append=True)
    for name in ("65536", "bert", "bert-padded", "paths"):
        task = TASKS[name]
        for mode in ("eager",) if name == "paths" else ("eager", "compiled"):
            for impl in task.impls[mode]:
                failed = (impl, mode) == ("sdpa-efficient", "eager") or (impl, name) == ("standard", "65536")
                rate = None if failed else speeds.get(impl, 200e3)
                one = training_row(task.suites[mode], name, impl, rate)
                if impl == "sdpa":
                    one = replace(one, outcome="done, flash_attention")
                file.write([one])
                shift = 0.0 if impl == task.reference else 0.1
                for what, curve in ((curves.LOSS, [9.0, 8.0 + shift, 3.0]), (curves.ACCURACY, [0.0, 0.7, 0.8])):
                    if one.tokens_per_s and (what == curves.LOSS or name == "paths"):
                        path = folder / curves.FILES[what]
                        curves.append(path, one.subject, SHARED.commit, curve, what)


def training_row(suite: str, task: str, impl: str, tokens_per_s: float | None) -> Row:
    """A row of the training benchmark; None ran out of memory."""
    found = row(TASKS[task].workload, impl, 1.0, suite=suite)
    return replace(
        found,
        tflops=None,
        gbps=None,
        outcome="done" if tokens_per_s else "out of memory",
        steps=3 if tokens_per_s else 0,
        tokens_per_s=tokens_per_s,
        median_ms=16384e3 / tokens_per_s if tokens_per_s else None,
        peak_gib=40.0 if impl == "standard" else 20.0,
        loss_last=3.0 if tokens_per_s else None,
    )
