"""Steps of decoding beside other implementations: writes `results/<device>/decode.csv`.

python -m benchmarks.decode [--only '*-page16-*'] [--impls flashgen,sdpa-cudnn] [--append] [--shard 0/2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cases import Ahead, add_case_arguments, selected
from benchmarks.decode_cases import IMPLS, STEPS, Caches, DecodeImpl, Step, caches
from benchmarks.gpu_turns import my_turn
from benchmarks.impls import Call
from benchmarks.opened import opened, usage_of
from benchmarks.provenance import Provenance, serve_generated
from benchmarks.race import GRAPH_BELOW_MS, attempt, in_turns
from benchmarks.results import DATA_COLUMNS, Row
from benchmarks.time_limit import TimeLimit
from flashgen.measure import gpu
from flashgen.measure.timing import CudaStopwatch, Stopwatch, Unit, Window, make_unit
from flashgen.tuning.shards import Shard

TOLERANCE = 2e-2
"""Of the largest output: two roundings of bfloat16 for the weights and the result."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = [name for name in options.impls.split(",") if name]
    with usage_of(parser):
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "decode", DATA_COLUMNS)
    impls = [impl for impl in IMPLS if not names or impl.name in names]
    ahead = Ahead(
        file, provenance.commit, [impl.name for impl in impls], shard, TimeLimit(options.limit_seconds, time.monotonic)
    )
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(None, Path(scratch))
        stopwatch = CudaStopwatch(gpu.sm_clock_mhz)

        def one(step: Step) -> bool:
            found = race(step, impls, stopwatch, window_ms=1e3 * options.window, rounds=options.rounds)
            file.write(
                row_of(step, impl, windows, provenance) for impl, windows in found if not isinstance(windows, str)
            )
            for impl, windows in found:
                print(f"  {line_of(step, impl, windows)}", flush=True)
            return not any(impl.name == "flashgen" and isinstance(windows, str) for impl, windows in found)

        return ahead.race(selected(STEPS, options.only), lambda step: step.suite, one)


def race(
    step: Step, impls: Sequence[DecodeImpl], stopwatch: Stopwatch, *, window_ms: float, rounds: int
) -> list[tuple[DecodeImpl, Sequence[Window] | str]]:
    """The windows of each implementation on a step, which take turns, or the reason why it has none."""
    found = caches(step, torch.device("cuda", 0))
    expected = oracle(step, found)
    units: dict[str, Unit | str] = {impl.name: _unit(impl, step, found, expected, stopwatch) for impl in impls}
    runners = [unit for unit in units.values() if isinstance(unit, Unit)]
    with my_turn():
        windows = in_turns(runners, stopwatch, rounds=rounds, warm_ms=window_ms / 2, window_ms=window_ms)
    timed = dict(zip(map(id, runners), windows, strict=True))
    named = [(impl, units[impl.name]) for impl in impls]
    return [(impl, unit if isinstance(unit, str) else timed[id(unit)]) for impl, unit in named]


def _unit(impl: DecodeImpl, step: Step, found: Caches, expected: torch.Tensor, stopwatch: Stopwatch) -> Unit | str:
    reason = impl.unsupported(step)
    if reason is not None:
        return reason

    def made() -> Unit | str:
        call = impl.prepare(step, found)
        if (why := _why_wrong(call, expected)) is not None:
            return why
        with my_turn():
            return make_unit(call.run, step.copies, stopwatch, call.context, graph_below_ms=GRAPH_BELOW_MS)

    return attempt(made)


def _why_wrong(call: Call, expected: torch.Tensor) -> str | None:
    with call.context():
        out = call.run(0)
    assert isinstance(out, torch.Tensor)
    error = (out[-1].double() - expected).abs().max() / expected.abs().max()
    return None if error <= TOLERANCE else f"its output is {float(error):.1e} of the largest away from the float64 one"


def oracle(step: Step, found: Caches) -> torch.Tensor:
    """The output of the last sequence in float64, (seqlen_q, nheads, head_dim_v), of the first set of caches."""
    w, length = step.workload, step.lens[-1]
    keys = torch.arange(length, device=found.lens.device)
    if found.table is None or w.page_size is None:
        k, v = found.k[0][-1, :length], found.v[0][-1, :length]
    else:
        pages = found.table[-1][keys // w.page_size].long()
        k, v = found.k[0][pages, keys % w.page_size], found.v[0][pages, keys % w.page_size]
    group = w.nheads // w.nheads_k
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", found.q[0][-1].double(), k) * w.head_dim**-0.5
    place = torch.arange(w.seqlen_q, device=keys.device)[:, None] + length - w.seqlen_q
    hidden = keys > place
    if w.window_left is not None:
        hidden = hidden | (keys < place - w.window_left)
    s = s.masked_fill(hidden, float("-inf"))
    if found.sinks is not None:
        s = torch.cat([s, found.sinks.double()[:, None, None].expand(-1, w.seqlen_q, 1)], -1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(s, -1)[..., :length].nan_to_num(), v)


def row_of(step: Step, impl: DecodeImpl, windows: Sequence[Window], provenance: Provenance) -> Row:
    """The row of an implementation; `gbps` counts the keys and values that queries see, once."""
    ms = statistics.median(window.ms for window in windows)
    timing = "graph" if ms < GRAPH_BELOW_MS else "queue"
    row = provenance.row(
        step.suite,
        step.workload,
        impl.name,
        impl.version(),
        median_ms=ms,
        timing=timing,
        data=step.profile,
        rates=False,
    )
    return replace(row, gbps=step.bytes / ms / 1e6)


def line_of(step: Step, impl: DecodeImpl, windows: Sequence[Window] | str) -> str:
    """One implementation's result for people."""
    if isinstance(windows, str):
        return f"{impl.name:15} no row: {windows}"
    ms = statistics.median(window.ms for window in windows)
    return f"{impl.name:15} {1e3 * ms:8.2f} us {step.bytes / ms / 1e6:6.0f} GB/s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=(__doc__ or "").split("\n")[0])
    add_case_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
