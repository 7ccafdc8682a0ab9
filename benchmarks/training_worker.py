"""One process of `benchmarks.training`: the runs that it is given, one after the other.

In one process, what every run needs (imports, the text, what torch.compile finds in its caches) is paid for once. A
crash costs the run in which it happens; the parent starts another process with those behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_gpt2
from gpt2 import Shape

Train = Callable[..., Any]


def main(
    arguments: Sequence[str] | None = None,
    train: Train = train_gpt2.train,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run; every run that came to an end of any kind is one line of JSON on stdout, among others that are not JSON.

    No run starts if the longest one so far would end after `--limit-seconds`.
    """
    options = _parser().parse_args(arguments)
    started, longest = clock(), 0.0
    for name in options.runs:
        begun = clock()
        if begun - started + longest > options.limit_seconds:
            break
        _report(train(_run(name, options), say=_say))
        _forget()
        longest = max(longest, clock() - begun)
    return 0


def _run(name: str, options: argparse.Namespace) -> train_gpt2.Options:
    seqlen, attention, mode = name.split(":")
    is_compiled = mode == "compiled"
    return train_gpt2.Options(
        attention=attention,
        seqlen=int(seqlen),
        steps=options.compiled_steps if is_compiled else options.steps,
        compile=is_compiled,
        limit_s=options.run_seconds,
        shape=Shape(seqlen=int(seqlen)),
    )


def _report(result: Any) -> None:
    print(
        json.dumps(asdict(result) | {"step_ms": result.step_ms, "tokens_per_s": result.tokens_per_s}),
        flush=True,
    )


def _say(line: str) -> None:
    print(f"    {line}", flush=True)


def _forget() -> None:
    """Nothing of a run may count as memory of the next one: not its model, its graphs or its workspaces."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", metavar="SEQLEN:ATTENTION:MODE", help="mode is eager or compiled")
    parser.add_argument("--steps", type=int, required=True, help="without torch.compile")
    parser.add_argument("--compiled-steps", type=int, required=True, help="with it")
    parser.add_argument("--run-seconds", type=float, required=True, help="longest run, behind its first step")
    parser.add_argument("--limit-seconds", type=float, required=True, help="start no run that would end later")
    return parser


if __name__ == "__main__":
    sys.exit(main())
