"""Races whose suites differ in who can run them: forward and backward passes of any shapes in one file."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.forward import chosen, racer_of, run, say
from benchmarks.impls import Impl
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import compile_part, prepare, undone
from benchmarks.provenance import serve_generated
from benchmarks.results import RACE_COLUMNS
from benchmarks.suites import select
from flashgen.core.workload import Workload
from flashgen.tuning.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Workloads of one direction, and who races on them."""

    name: str
    workloads: tuple[Workload, ...]
    impls: tuple[Impl, ...]

    @property
    def is_training(self) -> bool:
        """Whether gradients are computed."""
        return any(workload.direction == "backward" for workload in self.workloads)


def race_suites(
    name: str,
    suites: Sequence[Suite],
    known: Sequence[Impl],
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
) -> int:
    """Race them all, and write `<name>.csv`.

    Args:
        name: the benchmark's, a module of this package.
        suites: what is raced, of which `options.only` may choose workloads and `options.impls` implementations.
        known: all that `options.impls` may name, those of suites that are not raced included.
        parser: tells of what is wrong with the options.
        options: those of `forward.add_race_arguments`, `provenance.add_arguments` and `prepared.add_prepare_arguments`.
        arguments: what `options` were read from; those of this process if None.

    Returns:
        0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit.
    """
    began = time.monotonic()
    with usage_of(parser):
        names = {impl.name for impl in chosen(options.impls, known)}
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, name, RACE_COLUMNS)
    wanted = [
        replace(
            suite,
            workloads=select(suite.workloads, options.only),
            impls=tuple(impl for impl in suite.impls if impl.name in names),
        )
        for suite in suites
    ]
    codes = set()
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))
        done = file.done(provenance.commit)
        left = [undone([(suite.name, suite.workloads)], suite.impls, shard, done) for suite in wanted]
        if options.compile_part is None:
            if any(left):
                prepare(name, sys.argv[1:] if arguments is None else arguments, options.prepare, say)
            racer = racer_of(options, provenance)
        for suite, shapes in zip(wanted, left, strict=True):
            with nullcontext() if suite.is_training else torch.no_grad():
                if options.compile_part is not None:
                    compile_part(options.compile_part, shapes, suite.impls, torch.device("cuda", 0), say)
                    continue
                runs = [(suite.name, suite.workloads)]
                limit_s = options.limit_seconds - (time.monotonic() - began)
                codes.add(run(runs, suite.impls, file, provenance, racer, shard=shard, limit_s=limit_s, say=say))
    return next((code for code in (STOPPED, MISSING) if code in codes), 0)
