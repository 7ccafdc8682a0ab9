"""Packed GPT-2 in training: writes `results/<device>/packed_training.csv`.

python -m benchmarks.packed_training [--attentions flashgen,padded,flex] [--steps 100] [--run-seconds 60] [--append]

Each run is `examples/packed_gpt2.py` in a process of its own, with the same weights and documents; tokens/s are those
of documents, padding counts as none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashgen
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.impls import torch_version
from benchmarks.opened import opened, usage_of
from benchmarks.provenance import Provenance, add_arguments, serve_generated
from benchmarks.results import TRAINING_COLUMNS, Row, subject_of
from benchmarks.time_limit import TimeLimit
from benchmarks.varlen_tables import STEPS_SUITE
from flashgen.core.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "packed_gpt2.py"

WORKLOAD = Workload.parse("bwd-b32-h12-tq16384-s1024-d64-causal-varlen")
"""About as many documents as the example draws for a step."""

ATTENTIONS = ("flashgen", "padded", "flex")

START_SECONDS = 180.0
"""What a process may take for its imports, the text and the first step, which compiles FlexAttention."""

Result = Mapping[str, Any]
"""What the example reports of a run."""

Train = Callable[[str, int, float], Result | str]
"""(attention, steps, seconds behind the first step) to what a run found, or why there is nothing."""


def train(attention: str, steps: int, run_seconds: float, *, more: Sequence[str] = ()) -> Result | str:
    """Run the example; a process that hangs is ended. `more` are further options of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(EXAMPLE), "--attention", attention, "--steps", str(steps)]
        command += ["--limit-seconds", str(run_seconds), "--report", str(report), *more]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        limit_s = START_SECONDS + run_seconds
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"its process took longer than {limit_s:.0f} s"
        if not report.is_file():
            return f"its process ended with {code}"
        found: Result = json.loads(report.read_text())
        return found


def main(
    arguments: Sequence[str] | None = None, train: Train = train, clock: Callable[[], float] = time.monotonic
) -> int:
    """Run; 0 is done, 4 if flashgen has no row, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.attentions.split(",")
    if unknown := set(names) - set(ATTENTIONS):
        parser.error(f"an attention is one of {', '.join(ATTENTIONS)}, got {', '.join(sorted(unknown))}")
    with usage_of(parser):
        provenance, file = opened(options, "packed_training", TRAINING_COLUMNS)
    limit, done, has_row = TimeLimit(options.limit_seconds, clock), file.done(provenance.commit), True
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(None, Path(scratch))  # in the environment, which the children inherit
        for name in names:
            if subject_of(STEPS_SUITE, WORKLOAD.key, name) in done:
                continue
            if not limit.has_room():
                print("stopped at the time limit: run again with --append")
                return STOPPED
            found = train(name, options.steps, options.run_seconds)
            limit.part_ended()
            if not isinstance(found, str):
                file.write([row_of(name, found, provenance)])
            has_row = has_row and (name != "flashgen" or _has_rate(found))
            print(f"{name}: {line_of(found)}", flush=True)
    print(f"{file.path}: {len(file.rows)} rows")
    return 0 if has_row else MISSING


def row_of(name: str, result: Result, provenance: Provenance) -> Row:
    """The row of a run."""
    version = flashgen.__version__ if name == "flashgen" else torch_version()
    row = provenance.row(
        STEPS_SUITE, WORKLOAD, name, version, median_ms=result["step_ms"], outcome=result["outcome"], rates=False
    )
    losses = result["losses"]
    return replace(
        row,
        steps=len(losses),
        tokens_per_s=result["tokens_per_s"],
        peak_gib=result["peak_gib"],
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
    )


def line_of(found: Result | str) -> str:
    """One run for people."""
    if isinstance(found, str):
        return f"no row: {found}"
    return f"{found['tokens_per_s'] or 0:.0f} tokens/s, {found['outcome']}"


def _has_rate(found: Result | str) -> bool:
    return not isinstance(found, str) and found["tokens_per_s"] is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packed_training", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--attentions", default=",".join(ATTENTIONS), help="separated by commas (default: all)")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument(
        "--run-seconds", type=float, default=60.0, help="longest run, behind its first step (default: %(default)s)"
    )
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no run that would end later")
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
