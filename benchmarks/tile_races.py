"""What races of tiles have in common: a file of rows to which each shape is added when it is done."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.exit_codes import STOPPED
from benchmarks.search_files import add_rows, read
from flashgen.codegen.families import balanced
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Measurement
from flashgen.core.workload import Workload
from flashgen.measure.protocol import Executor, Outcome, specialization
from flashgen.tuning.compile_pool import Compiler, usable_cpus
from flashgen.tuning.runs import make_compiler, make_executor

COLUMNS = ("workload", "warpgroups", "block_n", "ms")

Shape = tuple[int, int]
"""Warpgroups and keys of a step."""


Kind = TypeVar("Kind", bound=tuple[int, ...])
"""What tells the configs of a race apart: a `Shape`, or that and more."""

ByClass = dict[tuple[int, bool], dict[Workload, dict[Kind, float]]]
"""Times in ms by head dimension and whether the mask is causal."""


def rows_of(
    workload: Workload,
    ours: Mapping[Kind, Config],
    outcomes: Mapping[Config, Outcome],
    columns: Sequence[str] = COLUMNS,
) -> list[dict[str, object]]:
    """A row for each tile that was timed."""
    return [
        dict(zip(columns, (workload.key, *shape, f"{outcome.median_ms:.5f}"), strict=True))
        for shape, config in ours.items()
        if isinstance(outcome := outcomes[config], Measurement)
    ]


def times_by_class(
    rows: Iterable[Mapping[str, str]], kind_of: Callable[[Mapping[str, str]], Kind], dtype: str
) -> ByClass[Kind]:
    """The times of a file, of one dtype."""
    found: ByClass[Kind] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        workload = Workload.parse(row["workload"])
        if workload.dtype == dtype:
            found[workload.head_dim, workload.causal][workload][kind_of(row)] = float(row["ms"])
    return found


def losses_of(
    times: Mapping[Workload, Mapping[Kind, float]],
    device: Device,
    configs: Callable[[Workload, Device], Mapping[Kind, Config]],
    kind_of: Callable[[Config], Kind],
) -> dict[Kind, list[float]]:
    """By the kind of a config: what serves shapes in its place, over the best one of each that was raced with it."""
    found: dict[Kind, list[float]] = defaultdict(list)
    for workload, of in times.items():
        spec, sizes = specialization(workload), Sizes.of(workload)
        for own, config in configs(workload, device).items():
            served = kind_of(balanced(config, spec, sizes, device))
            if served in of:
                found[own].append(of[served] / min(of.values()))
    return found


def race_all(
    options: argparse.Namespace,
    workloads_of: Callable[[Device], Iterable[Workload]],
    raced_one: Callable[[Executor, Compiler, Workload], list[dict[str, object]]],
    columns: Sequence[str] = COLUMNS,
) -> int:
    """Add the rows of every workload that the file has none of; 0 is done, 3 stopped at the time limit."""
    began, done = time.monotonic(), {row["workload"] for row in read(options.file)}
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(contextlib.closing(make_executor(options.gpu)))
        device = executor.describe().device
        compiler = stack.enter_context(make_compiler(device, options.jobs or usable_cpus()))
        for workload in workloads_of(device):
            if workload.key in done or not _is_asked_for(workload, options):
                continue
            if time.monotonic() - began > options.limit_seconds:
                return STOPPED
            add_rows(options.file, columns, raced_one(executor, compiler, workload))
            print(f"{workload.key}: done", file=sys.stderr, flush=True)
    return 0


def _is_asked_for(workload: Workload, options: argparse.Namespace) -> bool:
    masks = ("causal" if workload.causal else "full", None)
    return options.mask in masks and (not options.head_dim or workload.head_dim in options.head_dim)


def add_race_arguments(parser: argparse.ArgumentParser, *, fit: str) -> None:
    """The arguments of races whose rows go to a file, and of what is fitted to them."""
    parser.add_argument("file", type=Path, help="a CSV; what is there is gone on with")
    parser.add_argument("--fit", action="store_true", help=fit)
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16"), default="bf16", help="of all of that (default: %(default)s)"
    )
    parser.add_argument(
        "--target", default="h200", help="the GPU of the file, as `flashgen devices` has it (%(default)s)"
    )
    parser.add_argument("--head-dim", type=int, action="append", help="race these alone; may be repeated")
    parser.add_argument("--mask", choices=("full", "causal"), help="race such passes alone")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="of all races, the start included")
    parser.add_argument("--jobs", type=int, help="processes that compile; all CPUs but one without")
    parser.add_argument("--gpu", type=int, default=0, help="torch's number of the GPU (default: %(default)s)")
