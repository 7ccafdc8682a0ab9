"""Compiles what a benchmark races in processes side by side: its own process finds the kernels in caches on the disk.

FlexAttention compiles several variants for each shape and FlashAttention-4 a kernel for each kind of workload, one
behind the other and while the GPU waits; most of the time of a run without this is that.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.impls import Call, Impl
from benchmarks.problems import training_inputs
from benchmarks.provenance import ROOT
from benchmarks.race import attempt
from benchmarks.results import Subject, left_of, subject_of
from benchmarks.variants import Contestant, fastest
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.inputs import Inputs, make_inputs
from flashgen.tuning.shards import Shard

PREPARING_SECONDS = 240
"""What compiling beforehand may take; a race compiles what is not there by then."""

Say = Callable[[str], None]
Suites = Sequence[tuple[str, Sequence[Workload]]]
S = TypeVar("S")
C = TypeVar("C", bound=Contestant[Any])


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that can compile beforehand."""
    parser.add_argument(
        "--prepare", type=int, default=0, metavar="N", help="first compile in N processes side by side, untimed"
    )
    parser.add_argument("--compile-part", type=_part, metavar="I/N", help="call every N-th once, and write nothing")


def _part(text: str) -> Shard:
    try:
        return Shard.parse(text)
    except FlashgenError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def prepare(module: str, arguments: Sequence[str], processes: int, say: Say) -> float:
    """Fill the caches of torch.compile, Triton and the CuTe DSL in so many processes side by side, untimed.

    Args:
        module: of the benchmark, in `benchmarks`.
        arguments: those it was called with.
        processes: how many; none compiles nothing.
        say: told how they ended.

    Returns:
        The seconds that it took.
    """
    if not processes:
        return 0.0
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # before anybody imports it
    command, started = [sys.executable, "-m", f"benchmarks.{module}", *arguments], time.monotonic()
    commands = [[*command, "--compile-part", f"{n}/{processes}"] for n in range(processes)]
    threads = max(1, (os.cpu_count() or 1) // processes)
    codes = side_by_side(commands, threads=threads, seconds=PREPARING_SECONDS)
    took_s = time.monotonic() - started
    say(f"compiled in {processes} processes, which ended with {codes} ({took_s:.0f} s)")
    return took_s


def side_by_side(commands: Iterable[Sequence[str]], *, threads: int, seconds: float) -> list[int]:
    """Run commands that fill caches, quietly and all at once; their exit codes, -9 of what took longer.

    Args:
        commands: a process each.
        threads: of torch.compile in each of them.
        seconds: when those that are left are killed.
    """
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    children = [subprocess.Popen(command, cwd=ROOT, env=environment, **quiet) for command in commands]
    watch = threading.Timer(seconds, lambda: [child.kill() for child in children])
    watch.daemon = True
    watch.start()
    codes = [child.wait() for child in children]
    watch.cancel()
    return codes


def prepared(
    module: str,
    arguments: Sequence[str] | None,
    options: argparse.Namespace,
    suites: Suites,
    impls: Sequence[Impl],
    shard: Shard,
    done: Collection[Subject],
    say: Say,
) -> float | None:
    """What `--prepare` and `--compile-part` ask of a benchmark that races `impls` on this shard of its suites.

    What has a row of any of them among `done` is raced no more, and not compiled.

    Returns:
        The seconds that it took; None in a process that has compiled its part, and races nothing.
    """
    left = undone(suites, impls, shard, done)
    if options.compile_part is not None:
        compile_part(options.compile_part, left, impls, torch.device("cuda", 0), say)
        return None
    if not left:
        return 0.0
    return prepare(module, sys.argv[1:] if arguments is None else arguments, options.prepare, say)


def undone(suites: Suites, impls: Sequence[Impl], shard: Shard, done: Collection[Subject]) -> list[Workload]:
    """The workloads of a shard of suites of which no implementation has a row."""
    jobs = [(suite, workload) for suite, workloads in suites for workload in workloads]

    def subjects_of(job: tuple[str, Workload]) -> list[Subject]:
        suite, workload = job
        return [subject_of(suite, workload.key, impl.name) for impl in impls]

    return [workload for _, workload in left_of(jobs[shard.index :: shard.count], subjects_of, done)]


def compile_part(
    part: Shard, workloads: Sequence[Workload], impls: Sequence[Impl], where: torch.device, say: Say
) -> None:
    """Call each implementation of this part on each workload once."""
    for impl, workload in share_of(part, impls, workloads):
        say(f"{workload.key} {impl.name}: {call_once(impl, workload, _inputs_of(workload, where))}")
        release()


def release() -> None:
    """Give the GPU back what nobody holds any more: twelve processes that keep it have no room beside each other."""
    gc.collect()
    torch.cuda.empty_cache()


def _itself(call: Call) -> Call:
    return call


def share_of(part: Shard, impls: Sequence[C], subjects: Sequence[S]) -> list[tuple[C, S]]:
    """What a part calls. Neighbours are of one implementation, so that the slowest to compile is in all parts."""
    pairs = [(impl, subject) for impl in impls for subject in dict.fromkeys(subjects)]
    return pairs[part.index :: part.count]


def call_once(impl: C, subject: S, inputs: object, call_of: Callable[[Any], Call] = _itself) -> str:
    """Call an implementation, or each of its variants, once: "compiled", or why it cannot run.

    Args:
        impl: the implementation.
        subject: what it is called for.
        inputs: what it prepares itself for beside that.
        call_of: the call in what it gives.
    """

    def called(each: Any) -> bool | str:
        reason: str | None = each.unsupported(subject)
        if reason is not None:
            return reason
        call = call_of(each.prepare(subject, inputs))
        with call.context():
            call.run(0)
        return True

    found = fastest(impl, subject, enter=lambda each: attempt(partial(called, each)), trial=lambda each, made: 1.0)
    return found.made if isinstance(found.made, str) else "compiled"


def _inputs_of(workload: Workload, where: torch.device) -> Inputs:
    if workload.direction == "backward":
        return training_inputs(workload, copies=1, where=where)
    return make_inputs(workload, copies=1, seed=INPUT_SEED, device=where)
