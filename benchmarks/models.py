"""Attention of models as they run it, sustained, beside other implementations: writes `results/<device>/models.csv`.

python -m benchmarks.models [--model gemma-2-9b] [--only '*-wl1023-*'] [--impls flashgen,fa3] [--append]

An implementation that cannot run a workload has a row that says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.flex_variants import with_flex
from benchmarks.forward import add_race_arguments, chosen, racer_of, run, say
from benchmarks.impls import IMPLS
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import add_prepare_arguments, prepared
from benchmarks.provenance import add_arguments, serve_generated
from benchmarks.results import OUTCOME_COLUMNS
from benchmarks.suites import MODELS, model_workloads, select
from flashgen.tuning.shards import Shard

NAMES = ("flashgen", "flex", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4")
PEERS = tuple(impl for impl in IMPLS if impl.name in NAMES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no time where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with usage_of(parser):
        impls = with_flex(chosen(options.impls, PEERS), options.flex)
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "models", OUTCOME_COLUMNS)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(options.db, Path(scratch))
        suites = [(name, select(model_workloads(name), options.only)) for name in options.model or MODELS]
        seconds = prepared("models", arguments, options, suites, impls, shard, file.done(provenance.commit), say)
        if seconds is None:
            return 0
        racer = racer_of(options, provenance)
        return run(
            suites,
            impls,
            file,
            provenance,
            racer,
            reasons=True,
            shard=shard,
            limit_s=options.limit_seconds - seconds,
            say=say,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="a preset; default: all of these")
    add_race_arguments(parser, PEERS)
    add_prepare_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
