"""flashgen beside standard attention, eager and compiled: the suite `speedup` of `results/<device>/memory.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.forward import chosen, line_of, say
from benchmarks.impls import Call, Impl, standard_attention, standard_mask
from benchmarks.provenance import Provenance
from benchmarks.race import Pace, race
from benchmarks.results import ResultsFile, Row
from benchmarks.suites import HIDDEN, TOKENS
from flashgen.core.workload import Workload
from flashgen.launch.gpu import current_device
from flashgen.measure import gpu
from flashgen.measure.inputs import Inputs
from flashgen.measure.timing import CudaStopwatch

SPEEDUP_SUITE = "speedup"
SPEEDUP_SEQLENS = (2048, 16384)
"""The lengths of the papers' claims: 2 to 4 times as fast as standard attention at 2k, 5 to 7 times at 16k."""

SPEEDUP_HEAD_DIMS = (64, 128)
STANDARD, COMPILED = "standard", "standard-compiled"

KEEP_STANDARD = {"pattern_matcher": False}
"""Inductor's pattern matcher may find attention and call torch's fused kernel, which keeps no scores in memory."""


def speedup_grid() -> tuple[Workload, ...]:
    """16k tokens of hidden size 2048, heads of 64 and 128, with and without a causal mask."""
    return tuple(
        Workload(batch=TOKENS // s, nheads=HIDDEN // d, seqlen_q=s, head_dim=d, causal=causal)
        for d in SPEEDUP_HEAD_DIMS
        for s in SPEEDUP_SEQLENS
        for causal in (False, True)
    )


def speedup_impls() -> tuple[Impl, ...]:
    """flashgen, standard attention, and standard attention through torch.compile."""
    ours, eager = chosen(f"flashgen,{STANDARD}")
    return ours, eager, replace(eager, name=COMPILED, prepare=_compiled)


def measure_speedup(workload: Workload, file: ResultsFile, provenance: Provenance, pace: Pace) -> bool:
    """Write the rows of one workload, timed side by side; False if flashgen has none."""
    impls, done = speedup_impls(), file.done(provenance.commit)
    if any((SPEEDUP_SUITE, workload.key, impl.name) in done for impl in impls):
        return True
    stopwatch, where = CudaStopwatch(gpu.sm_clock_mhz), torch.device("cuda", 0)
    torch.cuda.empty_cache()
    results = race(workload, impls, device=current_device(), where=where, stopwatch=stopwatch, pace=pace)
    file.write(
        provenance.row(
            SPEEDUP_SUITE,
            workload,
            each.impl.name,
            each.impl.version(),
            median_ms=each.median_ms,
            timing=each.timing,
        )
        for each in results
        if each.reason is None
    )
    for result in results:
        say(f"{workload.key} {line_of(workload, result)}")
    return results[0].reason is None


def speedups(rows: Sequence[Row], over: str = STANDARD) -> dict[str, float]:
    """Time of standard attention, eager or compiled, over flashgen's, by workload."""
    times = {(row.workload, row.impl): row.median_ms for row in rows if row.suite == SPEEDUP_SUITE}
    found = {}
    for (workload, impl), ms in times.items():
        mine = times.get((workload, "flashgen"))
        if impl == over and ms and mine:
            found[workload] = ms / mine
    return found


def _compiled(workload: Workload, inputs: Inputs) -> Call:
    torch._dynamo.reset()  # each shape has its own code, and none is compiled for several
    function = torch.compile(standard_attention, dynamic=False, options=KEEP_STANDARD)
    mask = standard_mask(workload, inputs)

    def run(n: int) -> torch.Tensor:
        out: torch.Tensor = function(inputs.q[n], inputs.k[n], inputs.v[n], mask)
        return out

    return Call(run=run)
