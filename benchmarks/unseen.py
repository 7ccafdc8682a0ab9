"""Random shapes beside other implementations: writes `results/<device>/unseen.csv`.

python -m benchmarks.unseen [--seed 1] [--count 40] [--suite unseen_backward] [--append]

Nobody chose these shapes, and next to none has a record: they show what the look-up of a record serves. A suite draws
sizes from the whole of its range, head dims, groups and masks as models have them, and another seed draws others.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import mixed_races
from benchmarks.forward import add_race_arguments
from benchmarks.impls import IMPLS, Impl
from benchmarks.mixed_races import race_suites
from benchmarks.prepared import add_prepare_arguments
from benchmarks.provenance import add_arguments
from benchmarks.training_impls import BACKWARD
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.workload import Workload

PEERS = ("flashgen", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4")

HEAD_DIMS = (64, 64, 64, 72, 80, 96, 128, 128, 128, 128, 192, 256, 256)
"""As often as each is drawn."""

GROUPS, KEY_HEADS, BATCHES = (1, 1, 1, 2, 4, 8), (1, 2, 3, 4, 5, 8, 8, 12, 16, 20, 24, 32), (1, 1, 2, 3, 4, 8, 16)
MOST_HEADS = 64
FEWEST_TOKENS_LOG2, MOST_TOKENS_LOG2 = 7, 14
MOST_BYTES = 2 * 10**9
"""Of keys and values, so that rotated inputs fit beside each other."""

WINDOWS = (127, 512, 1023, 2047)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """How shapes of one suite are drawn.

    Attributes:
        least, most: floating-point operations of a pass.
        direction: forward or backward.
        few_queries: whether a head has 1 to 16 queries, and any number of keys.
        has_windows: whether some have a window.
    """

    least: float
    most: float
    direction: str = "forward"
    few_queries: bool = False
    has_windows: bool = False


SUITES = {
    "unseen_small": Suite(least=3e8, most=1e10),
    "unseen": Suite(least=1e10, most=6e11, has_windows=True),
    "unseen_few_queries": Suite(least=0, most=math.inf, few_queries=True),
    "unseen_backward": Suite(least=2e9, most=8e11, direction="backward"),
}


def workloads(name: str, *, seed: int, count: int) -> tuple[Workload, ...]:
    """The first shapes of a suite, each once; a larger count begins with those of a smaller one."""
    generator = random.Random(f"{name} {seed}")
    found = dict[Workload, None]()
    for drawn in _drawn(SUITES[name], generator):
        found[drawn] = None
        if len(found) == count:
            break
    return tuple(found)


def _drawn(suite: Suite, generator: random.Random) -> Iterator[Workload]:
    while True:
        keys = 2 ** generator.uniform(FEWEST_TOKENS_LOG2, MOST_TOKENS_LOG2)
        # lengths of training are powers of two, those of serving are any
        seqlen = 2 ** round(math.log2(keys)) if generator.random() < 0.4 else int(keys)
        nheads_k, group = generator.choice(KEY_HEADS), generator.choice(GROUPS)
        seqlen_k = int(seqlen * generator.uniform(1, 6)) if generator.random() < 0.2 else seqlen
        has_window = suite.has_windows and generator.random() < 0.15
        workload = Workload(
            direction=suite.direction,
            dtype="fp16" if generator.random() < 0.3 else "bf16",
            batch=generator.choice(BATCHES),
            nheads=nheads_k * group,
            nheads_k=nheads_k,
            seqlen_q=generator.randint(1, MAX_SEQLEN_Q) if suite.few_queries else seqlen,
            seqlen_k=seqlen_k,
            head_dim=generator.choice(HEAD_DIMS),
            causal=generator.random() < 0.55 or has_window,
            window_left=generator.choice(WINDOWS) if has_window else None,
        )
        held = 4 * workload.batch * nheads_k * seqlen_k * workload.head_dim
        if suite.least <= workload.flops <= suite.most and workload.nheads <= MOST_HEADS and held <= MOST_BYTES:
            yield workload


def raced(direction: str) -> tuple[Impl, ...]:
    """The implementations that race in one direction."""
    return tuple(impl for impl in (IMPLS if direction == "forward" else BACKWARD) if impl.name in PEERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    suites = [
        mixed_races.Suite(
            name=name,
            workloads=workloads(name, seed=options.seed, count=options.count),
            impls=raced(SUITES[name].direction),
        )
        for name in options.suite or SUITES
    ]
    return race_suites("unseen", suites, raced("forward"), parser, options, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="another one draws other shapes (%(default)s)")
    parser.add_argument("--count", type=int, default=40, help="shapes of a suite (%(default)s)")
    add_race_arguments(parser, raced("forward"))
    add_prepare_arguments(parser)
    parser.set_defaults(warm=0.02, window=0.045)
    return parser


if __name__ == "__main__":
    sys.exit(main())
