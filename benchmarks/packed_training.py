"""Packed GPT-2 in training: writes `results/<device>/packed_training.csv`.

python -m benchmarks.packed_training [--attentions flashgen,padded,flex] [--steps 100] [--append]

Each run is `examples/packed_gpt2.py` with the same weights and documents; tokens/s are those of documents, padding
counts as none.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.exit_codes import MISSING
from benchmarks.provenance import Provenance, add_arguments, serve_generated
from benchmarks.results import TRAINING_COLUMNS, ResultsFile, Row, subject_of
from benchmarks.varlen_tables import STEPS_SUITE
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import packed_gpt2

WORKLOAD = Workload.parse("bwd-b32-h12-tq16384-s1024-d64-causal-varlen")
"""About as many documents as the example draws for a step."""

ATTENTIONS = ("flashgen", "padded", "flex")


def main(arguments: Sequence[str] | None = None, train: Callable[..., Any] = packed_gpt2.train) -> int:
    """Run; 0 is done, 1 if flashgen has no row."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.attentions.split(",")
    if unknown := set(names) - set(ATTENTIONS):
        parser.error(f"an attention is one of {', '.join(ATTENTIONS)}, got {', '.join(sorted(unknown))}")
    try:
        provenance = Provenance.here(options.commit)
        path = options.results / provenance.slug / "packed_training.csv"
        file = ResultsFile(path, TRAINING_COLUMNS, append=options.append, commit=provenance.commit)
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))
    done, has_row = file.done(provenance.commit), True
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(None, Path(scratch))
        for name in names:
            if subject_of(STEPS_SUITE, WORKLOAD.key, name) in done:
                continue
            result = train(packed_gpt2.Options(attention=name, seqlen=packed_gpt2.LONGEST, steps=options.steps))
            file.write([row_of(name, result, provenance)])
            print(f"{name}: {result.tokens_per_s or 0:.0f} tokens/s, {result.outcome}", flush=True)
            has_row = has_row and (name != "flashgen" or result.tokens_per_s is not None)
            gc.collect()
            torch.cuda.empty_cache()
    return 0 if has_row else MISSING


def row_of(name: str, result: Any, provenance: Provenance) -> Row:
    """The row of a run."""
    row = provenance.row(
        STEPS_SUITE, WORKLOAD, name, torch.__version__, median_ms=result.step_ms, outcome=result.outcome, rates=False
    )
    first, last = (result.losses[0], result.losses[-1]) if result.losses else (None, None)
    return replace(
        row,
        steps=len(result.losses),
        tokens_per_s=result.tokens_per_s,
        peak_gib=result.peak_gib,
        loss_first=first,
        loss_last=last,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packed_training", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--attentions", default=",".join(ATTENTIONS), help="separated by commas (default: all)")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
