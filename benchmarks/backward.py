"""Backward pass beside other implementations, sustained: writes `results/<device>/backward.csv`.

python -m benchmarks.backward [--only '*-d128-causal'] [--impls flashgen,flex] [--append]

The forward pass has run before and is not timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flex_variants import with_flex
from benchmarks.forward import add_race_arguments, chosen, racer_of, run, say
from benchmarks.impls import Impl
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import add_prepare_arguments, prepared
from benchmarks.provenance import add_arguments, serve_generated
from benchmarks.results import RACE_COLUMNS
from benchmarks.suites import BACKWARD_SUITE, backward_grid, select
from benchmarks.training_impls import BACKWARD, alone
from flashgen.tuning.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRace:
    """What one benchmark of training races: `suite` also names its file and its module.

    `wrap` makes what races of an implementation of a forward pass.
    """

    suite: str
    about: str
    impls: tuple[Impl, ...]
    wrap: Callable[[Impl], Impl]


RACE = TrainingRace(suite=BACKWARD_SUITE, about=(__doc__ or "").split("\n", maxsplit=1)[0], impls=BACKWARD, wrap=alone)


def main(arguments: Sequence[str] | None = None, what: TrainingRace = RACE) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{what.suite}", description=what.about)
    add_arguments(parser)
    add_race_arguments(parser, what.impls)
    add_prepare_arguments(parser)
    options = parser.parse_args(arguments)
    with usage_of(parser):
        impls = with_flex(chosen(options.impls, what.impls), options.flex, what.wrap)
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, what.suite, RACE_COLUMNS)
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))
        jobs = [(what.suite, select(backward_grid(), options.only))]
        seconds = prepared(what.suite, arguments, options, jobs, impls, shard, file.done(provenance.commit), say)
        if seconds is None:
            return 0
        racer, limit_s = racer_of(options, provenance), options.limit_seconds - seconds
        return run(jobs, impls, file, provenance, racer, shard=shard, limit_s=limit_s, say=say)


if __name__ == "__main__":
    sys.exit(main())
