"""The benchmarks of a run of all: their commands, what they need beside torch, and which list does what."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import FA3, FA4, TRANSFORMERS, VLLM, ZSTANDARD

FOUR_WINDOWS = ("--rounds", "4", "--warm", "0.06", "--window", "0.1")
TWO_WINDOWS = ("--rounds", "2", "--warm", "0.06", "--window", "0.15")
"""Shorter than the benchmarks' own, and fewer where a row is one of a table that tells features or models apart."""

PREPARING = 12
"""Processes that compile beforehand, of all lists of a GPU."""
FP16_GRID = ("--suite", "forward_fp16", "--impls", "flashgen,sdpa-flash,sdpa-cudnn,fa4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One command: its options, about how many seconds it takes on one H200, and how it can be cut short.

    `prepare` is how many processes compile beforehand; one that `is_alone` takes no turns, and has the GPU to its end.
    """

    name: str
    module: str
    seconds: float
    options: tuple[str, ...] = ()
    prepare: int = 0
    is_sharded: bool = False
    has_limit: bool = False
    is_alone: bool = False
    needs: tuple[str, ...] = ()
    """Packages without which rows are left out, names of `benchmarks.peers`."""


def _race(name: str, seconds: float, *options: str, needs: tuple[str, ...], module: str = "") -> Benchmark:
    return Benchmark(
        name=name,
        module=module or name,
        seconds=seconds,
        options=options,
        prepare=PREPARING,
        is_sharded=True,
        has_limit=True,
        needs=needs,
    )


def _alone(name: str, seconds: float, *needs: str, has_limit: bool = False) -> Benchmark:
    return Benchmark(name=name, module=name, seconds=seconds, has_limit=has_limit, is_alone=True, needs=needs)


def _training(task: str, seconds: float) -> Benchmark:
    return Benchmark(
        name=f"training-{task}",
        module="training",
        seconds=seconds,
        options=(task,),
        prepare=4,
        has_limit=True,
        is_alone=True,
    )


BENCHMARKS: tuple[Benchmark, ...] = (
    _race("forward", 450, "--suite", "forward", *FOUR_WINDOWS, needs=(FA3, FA4)),
    _race("forward_fp16", 300, *FP16_GRID, *FOUR_WINDOWS, module="forward", needs=(FA4,)),
    Benchmark(name="data", module="data", seconds=950, is_sharded=True, has_limit=True, needs=(FA3, FA4)),
    _race("unseen", 700, needs=(FA3, FA4)),
    _race("varlen", 450, needs=(FA3, FA4)),
    _race("backward", 610, *FOUR_WINDOWS, needs=(FA4,)),
    _race("forward_backward", 750, *FOUR_WINDOWS, needs=(FA4,)),
    _race("features", 710, *TWO_WINDOWS, needs=(FA3, FA4)),
    _race("models", 670, *TWO_WINDOWS, needs=(FA3, FA4)),
    Benchmark(name="decode", module="decode", seconds=300, is_sharded=True, has_limit=True, needs=(FA3, FA4, VLLM)),
    _race("functions", 300, needs=(FA4,)),
    _race("regressions", 150, *FOUR_WINDOWS, needs=(FA3, FA4)),
    Benchmark(name="accuracy", module="accuracy", seconds=120, is_sharded=True, has_limit=True, needs=(FA3, FA4)),
    _alone("packed_training", 120, has_limit=True),
    _alone("overhead", 240, FA3, ZSTANDARD),
    _alone("memory", 90),
    _alone("spread", 30),
    _alone("dropout", 60),
    _training("16384", 150),
    _training("4096", 120),
    _training("1024", 120),
    _training("65536", 90),
    _training("bert", 100),
    _training("bert-padded", 120),
    _training("paths", 80),
    _alone("models_transformers", 150, TRANSFORMERS, has_limit=True),
    _alone("io", 90, has_limit=True),
)
"""In the order in which they are measured: what the README's claims stand on first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A benchmark, or a shard of one, in the list of that shard."""

    benchmark: Benchmark
    shard: int
    shards: int = 1

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.benchmark.name}.{self.shard}" if self.benchmark.is_sharded else self.benchmark.name

    @property
    def seconds(self) -> float:
        """About how long it takes on an H200."""
        return self.benchmark.seconds / self.shards

    def command(self, folder: Path, commit: str | None, limit_s: float, beside: int = 1) -> list[str]:
        """What is run, as one of so many lists of its GPU; `folder` gets its results."""
        words = [sys.executable, "-m", f"benchmarks.{self.benchmark.module}", *self.benchmark.options]
        words += ["--prepare", str(max(1, self.benchmark.prepare // beside))] if self.benchmark.prepare else []
        words += ["--results", str(folder), "--append"]
        words += ["--shard", f"{self.shard}/{self.shards}"] if self.benchmark.is_sharded else []
        words += ["--commit", commit] if commit else []
        return words + (["--limit-seconds", f"{limit_s:.0f}"] if self.benchmark.has_limit else [])


def planned(shards: int, only: Sequence[str] = ()) -> list[list[Job]]:
    """The jobs of each list: a shard of every race each, and the rest to whichever has the least to do.

    A benchmark is in the same list whatever else is asked for, so a run may be measured in parts.

    Raises:
        ValueError: a name in `only` is no benchmark's.
    """
    known = [each.name for each in BENCHMARKS]
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"a benchmark is one of {', '.join(known)}, got {', '.join(unknown)}")
    lists: list[list[Job]] = [[] for _ in range(shards)]
    for benchmark in BENCHMARKS:
        if benchmark.is_sharded:
            for shard, jobs in enumerate(lists):
                jobs.append(Job(benchmark=benchmark, shard=shard, shards=shards))
        else:
            shard = min(range(shards), key=lambda n: sum(job.seconds for job in lists[n]))
            lists[shard].append(Job(benchmark=benchmark, shard=shard))
    return [[job for job in jobs if job.benchmark.name in (only or known)] for jobs in lists]


def divided(lists: Sequence[Sequence[Job]], gpus: int) -> list[list[Job]]:
    """What each GPU works off: the lists are dealt out in turns, and those of one GPU merged in their common order."""
    order = {each.name: number for number, each in enumerate(BENCHMARKS)}
    dealt = ([job for jobs in lists[gpu::gpus] for job in jobs] for gpu in range(gpus))
    return [sorted(jobs, key=lambda job: order[job.benchmark.name]) for jobs in dealt]


def needed(jobs: Iterable[Job]) -> list[str]:
    """The packages that some of these jobs need."""
    return sorted({name for job in jobs for name in job.benchmark.needs})
