"""Packed sequences beside other implementations: writes `results/<device>/varlen.csv`.

python -m benchmarks.varlen [--only 'bwd-*'] [--impls flashgen,fa3] [--flex default] [--append] [--shard 0/2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.cases import Ahead, add_case_arguments, selected
from benchmarks.flex_variants import CHOICES
from benchmarks.gpu_turns import my_turn
from benchmarks.impls import results_of
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import add_prepare_arguments, call_once, prepare, release, share_of
from benchmarks.provenance import Provenance, add_db_argument, serve_generated
from benchmarks.race import Entry, RaceStopwatch, attempt, by_load, in_turns, timed, trial_ms
from benchmarks.results import DATA_COLUMNS, Row
from benchmarks.time_limit import TimeLimit
from benchmarks.variants import Entrant, fastest
from benchmarks.varlen_cases import PACKS, Pack, PackTensors, tensors_of
from benchmarks.varlen_impls import IMPLS, Ready, VarlenImpl, no_grad_of, with_flex
from flashgen.measure import gpu
from flashgen.measure.protocol import SETTLE_S
from flashgen.measure.reference import oracle
from flashgen.measure.timing import CudaStopwatch
from flashgen.tuning.shards import Shard

TOLERANCE = 2e-2
"""Of the largest output: two roundings of bfloat16 for the weights and the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a race found of one implementation: ms of a call, and how it was timed ("graph" or "queue")."""

    ms: float
    timing: str
    queued_because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """An implementation that was checked, and the share of its time that counts, as in `Ready`."""

    entry: Entry
    share: float


def main(arguments: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    names = [name for name in options.impls.split(",") if name]
    with usage_of(parser):
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "varlen", DATA_COLUMNS)
    impls = [impl for impl in with_flex(IMPLS, options.flex) if not names or impl.name in names]
    packs, limit = selected(PACKS, options.only), TimeLimit(options.limit_seconds, clock)
    where = torch.device("cuda", 0)
    ahead = Ahead(file, provenance.commit, [impl.name for impl in impls], shard, limit)
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))
        left = ahead.left(packs, lambda pack: pack.suite)
        if (part := options.compile_part) is not None:
            compile_part(part, left, impls, where)
            return 0
        if left:
            prepare("varlen", arguments, options.prepare, print)
        stopwatch = CudaStopwatch(gpu.sm_clock_mhz)
        pace = {"window_ms": 1e3 * options.window, "rounds": options.rounds}

        def one(pack: Pack) -> bool:
            with no_grad_of[pack.trains]():
                found = race(pack, impls, stopwatch, where=where, **pace)
            file.write(row_of(pack, impl, each, provenance) for impl, each in found if isinstance(each, Timed))
            for impl, each in found:
                print(f"  {line_of(pack, impl, each)}", flush=True)
            return not any(impl.name == "flashgen" and isinstance(each, str) for impl, each in found)

        return ahead.race(packs, lambda pack: pack.suite, one)


def compile_part(part: Shard, packs: Sequence[Pack], impls: Sequence[VarlenImpl], where: torch.device) -> None:
    """Call each implementation of this part on each batch once."""
    for impl, pack in share_of(part, impls, packs):
        with no_grad_of[pack.trains]():
            told = call_once(impl, pack, tensors_of(pack, where), lambda ready: ready.call)
        print(f"{pack.workload.key} {impl.name}: {told}", flush=True)
        release()


def race(
    pack: Pack,
    impls: Sequence[VarlenImpl],
    stopwatch: RaceStopwatch,
    *,
    where: torch.device,
    window_ms: float,
    rounds: int,
) -> list[tuple[VarlenImpl, Timed | str]]:
    """The median time of each implementation, which take turns, or the reason why it has none.

    One with variants is there as the variant that raced.
    """
    with stopwatch.stream():
        return _race(pack, impls, stopwatch, tensors_of(pack, where), window_ms, rounds)


def _race(
    pack: Pack,
    impls: Sequence[VarlenImpl],
    stopwatch: RaceStopwatch,
    tensors: PackTensors,
    window_ms: float,
    rounds: int,
) -> list[tuple[VarlenImpl, Timed | str]]:
    expected = last_output(pack, tensors)
    entrants = [_entrant(impl, pack, tensors, expected, stopwatch) for impl in impls]
    for each in entrants:
        print(*(f"    {trial}" for trial in each.trials), sep="\n", end="\n" if each.trials else "")
    made = {each.impl.name: each.made for each in entrants}
    runners = [(name, found) for name, found in made.items() if isinstance(found, _Runner)]
    results: dict[str, Timed | str] = {name: found for name, found in made.items() if isinstance(found, str)}
    with my_turn():
        results |= _windows(runners, stopwatch, window_ms, rounds)
    return [(each.impl, results[each.impl.name]) for each in entrants]


def _windows(
    runners: Sequence[tuple[str, _Runner]], stopwatch: RaceStopwatch, window_ms: float, rounds: int
) -> dict[str, Timed]:
    results, settle_ms = dict[str, Timed](), 1e3 * SETTLE_S
    for heat in by_load([each.share * each.entry.unit.call_ms for _, each in runners]):
        units = [runners[index][1].entry.unit for index in heat]
        windows = in_turns(
            units, stopwatch, rounds=rounds, warm_ms=window_ms / 2, window_ms=window_ms, settle_ms=settle_ms
        )
        settle_ms = 0.0  # the card is loaded from here on
        for index, each in zip(heat, windows, strict=True):
            name, runner = runners[index]
            results[name] = Timed(
                ms=runner.share * statistics.median(window.ms for window in each),
                timing=runner.entry.unit.timing,
                queued_because=runner.entry.queued_because,
            )
    return results


def _entrant(
    impl: VarlenImpl, pack: Pack, tensors: PackTensors, expected: torch.Tensor, stopwatch: RaceStopwatch
) -> Entrant[VarlenImpl, _Runner]:
    return fastest(
        impl,
        pack,
        enter=lambda each: _runner(each, pack, tensors, expected, stopwatch),
        trial=lambda _, made: attempt(lambda: trial_ms(made.entry.unit, stopwatch)),
    )


def _runner(
    impl: VarlenImpl, pack: Pack, tensors: PackTensors, expected: torch.Tensor, stopwatch: RaceStopwatch
) -> _Runner | str:
    reason = impl.unsupported(pack)
    if reason is not None:
        return reason

    def made() -> _Runner | str:
        ready = impl.prepare(pack, tensors)
        if (why := why_wrong(ready, expected)) is not None:
            return why
        entry = timed(ready.call, pack.copies, stopwatch)
        return entry if isinstance(entry, str) else _Runner(entry=entry, share=ready.share)

    return attempt(made)


def why_wrong(ready: Ready, expected: torch.Tensor) -> str | None:
    """Run once: None if the rows of the last sequence are right, or are those of another batch."""
    with ready.call.context():
        *_, out = results_of(ready.call.run(0))
    if ready.rows is None:
        return None
    last = ready.rows(out.detach())[-len(expected) :]
    error = (last.double() - expected).abs().max() / expected.abs().max()
    return None if error <= TOLERANCE else f"its output is {float(error):.1e} of the largest away from the float64 one"


def last_output(pack: Pack, tensors: PackTensors) -> torch.Tensor:
    """The output of the last sequence in float64, (queries, nheads, head_dim_v), of the first set of tensors."""
    last = (tensors.q[0][-pack.queries[-1] :], *tensors.keys_of_last(pack))
    q, k, v = (one.detach().transpose(0, 1)[None] for one in last)
    out, _ = oracle(q, k, v, causal=pack.workload.causal)
    return out[0].transpose(0, 1)


def row_of(pack: Pack, impl: VarlenImpl, found: Timed, provenance: Provenance) -> Row:
    """The row of an implementation; `tflops` counts the pairs that lengths leave visible, of all passes timed."""
    options = {"median_ms": found.ms, "timing": found.timing, "data": pack.workload.lengths, "rates": False}
    row = provenance.row(pack.suite, pack.workload, impl.name, impl.version(), **options)  # type: ignore[arg-type]
    return replace(row, tflops=pack.flops / found.ms / 1e9)


def line_of(pack: Pack, impl: VarlenImpl, found: Timed | str) -> str:
    """One implementation's result for people."""
    if isinstance(found, str):
        return f"{impl.name:15} no row: {found}"
    tail = f"{found.timing}: {found.queued_because}" if found.queued_because else found.timing
    return f"{impl.name:15} {found.ms:8.4f} ms {pack.flops / found.ms / 1e9:6.0f} TFLOP/s, {tail}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.varlen", description=(__doc__ or "").split("\n")[0])
    add_db_argument(parser)
    parser.add_argument("--flex", choices=CHOICES, default=CHOICES[0], help="variants of FlexAttention (%(default)s)")
    add_case_arguments(parser)
    add_prepare_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
