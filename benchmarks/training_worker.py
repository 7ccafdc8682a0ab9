"""A child of `benchmarks.training`: the runs that it is given, one after the other.

In one process, what every run needs (imports, the text, what torch.compile finds in its caches) is paid for once. A
crash costs the run in which it happens; the parent starts another process with those behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.time_limit import TimeLimit
from benchmarks.training_tasks import BERT_SUITE, COMPILED, EAGER, EAGER_SUITE, LONG_SUITE, PADDED_SUITE, TASKS, Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_bert
import train_gpt2
import train_paths
from gpt2 import Shape

Train = Callable[..., Any]


def train_any(options: Any, say: Callable[[str], None]) -> Any:
    """Train whichever model these are the options of."""
    for example in (train_gpt2, train_bert, train_paths):
        if isinstance(options, example.Options):
            return example.train(options, say=say)
    raise TypeError(f"there is an example for each kind of options, got {type(options)}")


def main(
    arguments: Sequence[str] | None = None,
    train: Train = train_any,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run; every run that came to an end of any kind is one line of JSON on stdout, among others that are not JSON.

    No run starts if the longest one so far would end after `--limit-seconds`.
    """
    options = _parser().parse_args(arguments)
    limit = TimeLimit(options.limit_seconds, clock)
    for name in options.runs:
        if not limit.has_room():
            break
        with _compiled_as_written(name):
            _report(train(run_of(name, options, _memory_bytes()), say=_say))
        _forget()
        limit.part_ended()
    return 0


def run_of(name: str, options: argparse.Namespace, memory_bytes: float) -> Any:
    """The options of the example that makes a run, on a device with so much memory."""
    which, attention, mode = name.split(":")
    task, is_compiled = TASKS[which], mode == COMPILED
    steps = options.compiled_steps if is_compiled else options.steps
    shared = {
        "attention": attention,
        "seqlen": task.workload.seqlen_q,
        "tokens": task.tokens,
        "steps": task.steps if steps is None else steps,
        "compile": is_compiled,
        "limit_s": task.run_seconds if options.run_seconds is None else options.run_seconds,
    }
    return _of_task(task, shared, recompute=task.recomputes(attention, mode, memory_bytes))


def _compiled_as_written(name: str) -> contextlib.AbstractContextManager[object]:
    """Inductor's pattern matcher would put torch's fused kernel in the place of standard attention, which is not it."""
    if name.split(":")[1] != "standard":
        return contextlib.nullcontext()
    config: Any = importlib.import_module("torch._inductor.config")
    patched: contextlib.AbstractContextManager[object] = config.patch(pattern_matcher=False)
    return patched


def _of_task(task: Task, shared: dict[str, Any], *, recompute: bool) -> Any:
    suite = task.suites[EAGER]
    if suite in (EAGER_SUITE, LONG_SUITE):
        return train_gpt2.Options(**shared, shape=Shape(seqlen=shared["seqlen"]), recompute=recompute)
    if suite in (BERT_SUITE, PADDED_SUITE):
        return train_bert.Options(**shared, padded=suite == PADDED_SUITE)
    return train_paths.Options(**shared)


def _memory_bytes() -> float:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else float("inf")


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
    parser.add_argument("runs", nargs="+", metavar="TASK:ATTENTION:MODE", help="mode is eager or compiled")
    parser.add_argument("--steps", type=int, help="without torch.compile (default: those of the task)")
    parser.add_argument("--compiled-steps", type=int, help="with it (default: those of the task)")
    parser.add_argument("--run-seconds", type=float, help="longest run, behind its first step (default: of the task)")
    parser.add_argument("--limit-seconds", type=float, required=True, help="start no run that would end later")
    return parser


if __name__ == "__main__":
    sys.exit(main())
