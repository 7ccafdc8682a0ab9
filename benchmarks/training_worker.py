"""One process of `benchmarks.training`: trains with one attention at one length, without and with torch.compile.

A process of its own, so that a crash or memory that is not given back costs no other run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_gpt2
from gpt2 import Shape

Train = Callable[..., Any]


def main(arguments: Sequence[str] | None = None, train: Train = train_gpt2.train) -> int:
    """Run; the report has a line of JSON for each run that came to an end of any kind."""
    options = _parser().parse_args(arguments)
    with options.report.open("w") as report:
        for compiled, steps in ((False, options.steps), (True, options.compiled_steps)):
            if not steps:
                continue
            run = train_gpt2.Options(
                attention=options.attention,
                seqlen=options.seqlen,
                steps=steps,
                compile=compiled,
                limit_s=options.limit_seconds,
                shape=Shape(seqlen=options.seqlen),
            )
            result = train(run, say=lambda line: print(f"    {line}", flush=True))
            report.write(json.dumps(asdict(result) | {"step_ms": result.step_ms, "tokens_per_s": result.tokens_per_s}))
            report.write("\n")
            report.flush()
            gc.collect()
            torch.cuda.empty_cache()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--attention", choices=sorted(train_gpt2.ATTENTIONS), required=True)
    parser.add_argument("--seqlen", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="without torch.compile")
    parser.add_argument("--compiled-steps", type=int, required=True)
    parser.add_argument("--limit-seconds", type=float, required=True, help="of one run")
    parser.add_argument("--report", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
