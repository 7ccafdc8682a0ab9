"""Memory beside inputs and output, and the speed-up over standard attention: writes `results/<device>/memory.csv`.

    python -m benchmarks.memory [--suite training_memory --append]

Memory is what `torch.cuda.max_memory_allocated` saw during one call, less what was there before and less what the call
returns: the output, of a forward and a backward pass together also dq, dk and dv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import flashgen
from benchmarks.exit_codes import MISSING
from benchmarks.forward import say
from benchmarks.impls import IMPLS, Call, Impl, results_of, standard_bytes
from benchmarks.opened import opened, usage_of
from benchmarks.problems import training_inputs
from benchmarks.provenance import Provenance, add_arguments, serve_generated
from benchmarks.race import Pace
from benchmarks.results import MEMORY_COLUMNS, ResultsFile, Row
from benchmarks.speedup import COMPILED, SPEEDUP_SUITE, STANDARD, measure_speedup, speedup_grid, speedups
from benchmarks.training_impls import FORWARD_BACKWARD
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.inputs import Inputs, make_inputs

MEMORY_SUITE, TRAINING_SUITE = "memory", "training_memory"
SUITES = (MEMORY_SUITE, TRAINING_SUITE, SPEEDUP_SUITE)
SEQLENS = tuple(1024 << n for n in range(7))
TRAINING_HEAD_DIMS = (64, 128)
"""GPT-2's, which FlashAttention's claims of memory are about, and that of the other memory rows."""

SPARE = 1.1
"""Free memory wanted for a call, relative to the arithmetic of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A line through bytes against seqlen; `r2` is the share of the variance that it explains."""

    bytes_per_token: float
    constant_bytes: float
    r2: float

    def __str__(self) -> str:
        return f"{self.bytes_per_token:.1f} bytes per token + {self.constant_bytes:.0f}, R2 {self.r2:.6f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen could not be measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with usage_of(parser):
        provenance, file = opened(options, "memory", MEMORY_COLUMNS)
    suites = options.suite or SUITES
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(None, Path(scratch))
        measured = [
            _memory(suite, workload, impl, file, provenance)
            for suite, grid, impls in (
                (MEMORY_SUITE, memory_grid(), memory_impls()),
                (TRAINING_SUITE, training_grid(), training_impls()),
            )
            if suite in suites
            for workload in grid
            for impl in impls
        ]
        if SPEEDUP_SUITE in suites:
            pace = Pace(warm_ms=1e3 * options.warm, window_ms=1e3 * options.window, rounds=options.rounds)
            measured += [measure_speedup(workload, file, provenance, pace) for workload in speedup_grid()]
    for impl in memory_impls():
        fit = fit_of(file.rows, impl.name)
        say(f"{impl.name:14} {fit or 'too few lengths for a line'}")
    for workload, saving in savings(file.rows).items():
        say(f"{workload.key}: both passes of standard attention hold {saving:.1f} times the memory of flashgen's")
    for impl in (STANDARD, COMPILED):
        for name, ratio in speedups(file.rows, impl).items():
            say(f"{name}: {ratio:.1f} times as fast as {impl} attention")
    return 0 if all(measured) else MISSING


def memory_grid() -> tuple[Workload, ...]:
    """One sequence of 16 heads of 128, 1k to 64k tokens."""
    return tuple(Workload(batch=1, nheads=16, seqlen_q=s, head_dim=128) for s in SEQLENS)


def training_grid() -> tuple[Workload, ...]:
    """One sequence of 16 heads of 64 or 128, 1k to 64k tokens, forward and backward."""
    return tuple(
        Workload(direction="backward", batch=1, nheads=16, seqlen_q=s, head_dim=d)
        for d in TRAINING_HEAD_DIMS
        for s in SEQLENS
    )


def memory_impls() -> tuple[Impl, ...]:
    """What is asked for its memory: flashgen as it is and with the LSE, which SDPA computes in every call."""
    known = {impl.name: impl for impl in IMPLS}
    plain = known["flashgen"]
    with_lse = Impl(name="flashgen-lse", version=plain.version, unsupported=plain.unsupported, prepare=_flashgen_lse)
    return plain, with_lse, known["sdpa-flash"], known["standard"]


def training_impls() -> tuple[Impl, ...]:
    """What is asked for the memory of a forward and a backward pass together."""
    wanted = ("flashgen", "sdpa-flash", "standard")
    return tuple(impl for impl in FORWARD_BACKWARD if impl.name in wanted)


def extra_bytes(call: Call) -> int:
    """Most memory that one call held at a time, beside its inputs and what it returns, in bytes."""
    with call.context():
        call.run(0)  # compiles, and makes the libraries allocate what they keep
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call.run(0)
        torch.cuda.synchronize()
    results = sum(tensor.numel() * tensor.element_size() for tensor in results_of(out))
    held: int = torch.cuda.max_memory_allocated() - before - results
    return held + call.held_bytes


def fit_of(rows: Sequence[Row], impl: str) -> Fit | None:
    """The line through one implementation's memory rows; None with fewer than three lengths."""
    points = [
        (Workload.parse(row.workload).seqlen_k, row.extra_bytes)
        for row in rows
        if row.suite == MEMORY_SUITE and row.impl == impl and row.extra_bytes is not None
    ]
    if len(points) < 3:
        return None
    lengths, sizes = [float(n) for n, _ in points], [float(size) for _, size in points]
    line = statistics.linear_regression(lengths, sizes)
    mean = statistics.fmean(sizes)
    left = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(lengths, sizes, strict=True))
    total = sum((y - mean) ** 2 for y in sizes)
    r2 = 1 - left / total if total else 1.0
    return Fit(bytes_per_token=line.slope, constant_bytes=line.intercept, r2=r2)


def savings(rows: Sequence[Row]) -> dict[Workload, float]:
    """All memory of a forward and a backward pass of standard attention over that of flashgen's, by workload.

    All is what the papers compare: q, k, v, the output and the gradients of these four, and what is held beside them.
    """
    held = {(row.workload, row.impl): row.extra_bytes for row in rows if row.suite == TRAINING_SUITE}
    found = {}
    for (key, impl), theirs in held.items():
        mine = held.get((key, "flashgen"))
        if impl == "standard" and theirs is not None and mine is not None:
            workload = Workload.parse(key)
            found[workload] = (theirs + tensors_bytes(workload)) / (mine + tensors_bytes(workload))
    return found


def tensors_bytes(workload: Workload) -> int:
    """q, k, v, out and the gradients of these four."""
    return 2 * (replace(workload, direction="forward").bytes - 4 * workload.batch * workload.nheads * workload.seqlen_q)


def _memory(suite: str, workload: Workload, impl: Impl, file: ResultsFile, provenance: Provenance) -> bool:
    """One row; False if flashgen has none."""
    if (suite, workload.key, impl.name) in file.done(provenance.commit):
        return True
    torch.cuda.empty_cache()
    reason = _why_too_large(workload, impl)
    if reason is None:
        inputs = _inputs(workload)
        try:
            size = extra_bytes(impl.prepare(workload, inputs))
        except (FlashgenError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason is not None:
        say(f"{workload.key} {impl.name}: no row: {reason}")
        return not impl.name.startswith("flashgen")
    file.write([provenance.row(suite, workload, impl.name, impl.version(), extra_bytes=size)])
    say(f"{workload.key} {impl.name}: {size / 2**20:.2f} MiB")
    return True


def _inputs(workload: Workload) -> Inputs:
    where = torch.device("cuda", 0)
    if workload.direction == "backward":
        return training_inputs(workload, copies=1, where=where)
    return make_inputs(workload, copies=1, seed=INPUT_SEED, device=where)


def _why_too_large(workload: Workload, impl: Impl) -> str | None:
    """Standard attention is asked as far as it fits, and running out of memory is not the way to find out."""
    if impl.name != "standard":
        return None
    free, _ = torch.cuda.mem_get_info()
    needed = SPARE * (standard_bytes(workload) + workload.bytes)
    return f"it needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free" if needed > free else None


def _flashgen_lse(workload: Workload, inputs: Inputs) -> Call:
    q, k, v = inputs.q, inputs.k, inputs.v

    def run(n: int) -> torch.Tensor:
        out, _ = flashgen.attention(q[n], k[n], v[n], causal=workload.causal, return_lse=True)
        return out

    return Call(run=run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--warm", type=float, default=0.1, help="seconds of a visit before its window (%(default)s)")
    parser.add_argument("--window", type=float, default=0.3, help="seconds of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="visits of each implementation (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
