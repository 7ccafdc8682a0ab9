"""Shapes on which flashgen was behind a peer once: writes `results/<device>/regressions.csv`.

python -m benchmarks.regressions [--suite regressions_backward] [--only '*-fp32-*'] [--append]

None of them is in another suite: float32, heads of other than 64, 128 and 256 columns at sizes of few waves, many query
heads over one or few of keys, and lengths that no list has. The fastest of torch's kernels in float32 is its efficient
one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.forward import add_race_arguments
from benchmarks.impls import EFFICIENT, IMPLS, Impl
from benchmarks.mixed_races import Suite, race_suites
from benchmarks.prepared import add_prepare_arguments
from benchmarks.provenance import add_arguments
from benchmarks.training_impls import BACKWARD, EFFICIENT_BACKWARD
from flashgen.core.workload import Workload

PEERS = ("flashgen", "sdpa-flash", "sdpa-cudnn", EFFICIENT.name, "fa3", "fa4")

FORWARD_SUITE, BACKWARD_SUITE = "regressions", "regressions_backward"

MASKS = (False, True)

FLOAT32 = tuple(
    Workload(dtype="fp32", batch=batch, nheads=2048 // head_dim, seqlen_q=4096, head_dim=head_dim, causal=causal)
    for head_dim in (64, 128)
    for batch in (1, 2)
    for causal in MASKS
)
"""One batch more is another workload, which the nearest record serves."""

FEW_WAVES = tuple(
    Workload(dtype="fp16", batch=2, nheads=8, seqlen_q=seqlen, head_dim=head_dim, causal=causal)
    for head_dim in (40, 80, 96, 160)
    for seqlen in (512, 1024)
    for causal in MASKS
)
"""Heads as Stable Diffusion 1.5 and others have them."""

MULTI_QUERY = tuple(
    Workload(batch=batch, nheads=71, nheads_k=1, seqlen_q=2100, head_dim=64, causal=True) for batch in (1, 2)
)
"""Falcon-7B's heads."""

ONE_QUERY = (Workload(batch=64, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=8192, head_dim=128),)
"""A step of decoding that is asked for as a forward pass."""

TRAINING = partial(Workload, direction="backward")
GROUPED = TRAINING(batch=1, nheads=28, nheads_k=4, seqlen_q=5000, head_dim=128, causal=True)
"""Qwen2-7B's heads."""
ENCODER = TRAINING(batch=32, nheads=16, seqlen_q=384, head_dim=64)
"""BERT-large's heads."""
FLOAT32_TRAINING = tuple(
    TRAINING(dtype="fp32", batch=2, nheads=2048 // head_dim, seqlen_q=2048, head_dim=head_dim, causal=True)
    for head_dim in (64, 128)
)

WORKLOADS: dict[str, tuple[Workload, ...]] = {
    FORWARD_SUITE: (*FLOAT32, *FEW_WAVES, *MULTI_QUERY, *ONE_QUERY),
    BACKWARD_SUITE: (GROUPED, ENCODER, *FLOAT32_TRAINING),
}


def raced(suite: str) -> tuple[Impl, ...]:
    """The implementations that race in a suite."""
    known = (*BACKWARD, EFFICIENT_BACKWARD) if suite == BACKWARD_SUITE else (*IMPLS, EFFICIENT)
    return tuple(impl for impl in known if impl.name in PEERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.suite or WORKLOADS
    suites = [Suite(name=name, workloads=WORKLOADS[name], impls=raced(name)) for name in names]
    return race_suites("regressions", suites, raced(FORWARD_SUITE), parser, options, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regressions", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=list(WORKLOADS), help="repeatable (default: all)")
    add_race_arguments(parser, raced(FORWARD_SUITE))
    add_prepare_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
