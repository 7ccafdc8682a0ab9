"""What the examples share: what a run is told, its steps with their times, and what it found."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARM_UP_STEPS = 10
"""Steps without a time, or a third of those that were made: kernels are compiled, the clock of the card settles."""

SAY_EVERY = 20
"""The most steps between two looks at the loss, for each of which the host waits; fewer where they last a second."""

REFUSALS = ("No available kernel", "cuDNN Frontend error", "No valid execution plans")
"""What torch says where the backend that was named does not serve a call."""

Say = Callable[[str], None]
Batch = tuple[torch.Tensor, ...]


@dataclass
class Result:
    """One run. `outcome` says why it ended early, if it did: what there is of it counts nevertheless.

    Times of single steps are in ms, without those of the warm-up; `tokens` are those of a step; `peak_gib` is the most
    memory that was allocated at a time, less what was there before the run. `accuracies` are those of the batches of a
    classification, each before the model has learnt from it.
    """

    attention: str
    backend: str
    seqlen: int
    compiled: bool
    tokens: int = 0
    outcome: str = "done"
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0

    @property
    def step_ms(self) -> float | None:
        """The median time of a step."""
        return statistics.median(self.steps_ms) if self.steps_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that training sees in a second, at the median step."""
        return self.tokens / self.step_ms * 1e3 if self.step_ms else None


@dataclass(frozen=True)
class Options:
    """What a run is; `limit_s` after the first step, which compiles and loads, it ends even if `steps` are not done."""

    attention: str = "flashgen"
    seqlen: int = 1024
    steps: int = 200
    compile: bool = False
    seed: int = 1337
    limit_s: float = float("inf")
    device: str = "cuda"
    tokens: int = 16384


@dataclass(frozen=True)
class Training:
    """What is trained: `model(*batch)` is the loss, or the loss and the share of a batch that was classified right.

    `rate` is the learning rate of each step, counted from 0.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    rate: Callable[[int], float]


def train(options: Options, backend: str, build: Callable[[], Training], *, say: Say = lambda line: None) -> Result:
    """Train for a few steps. Running out of memory is an outcome and no error, as is a backend that refuses."""
    result = Result(
        attention=options.attention,
        backend=backend,
        seqlen=options.seqlen,
        compiled=options.compile,
        tokens=options.tokens,
    )
    cuda, before = options.device == "cuda", 0
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    try:
        _steps(options, build(), result, say)
    except torch.OutOfMemoryError:
        result.outcome = "out of memory"
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        result.outcome = "no kernel"
    if cuda:
        result.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    return result


def _steps(options: Options, training: Training, result: Result, say: Say) -> None:
    clock, found, started, look = Clock(options.device), [], time.monotonic(), 0
    for step in range(options.steps):
        batch = [_moved(tensor, options.device) for tensor in next(training.batches)]
        found.append(_step(training, batch, training.rate(step), options.device))
        clock.mark()
        if step < look and step + 1 < options.steps:
            continue  # the host runs ahead of the device
        for loss, accuracy in found:
            result.losses.append(float(loss))
            result.accuracies += [] if accuracy is None else [float(accuracy)]
        found.clear()
        times = clock.steps_ms()
        result.steps_ms = times[warm_up(len(times)) :]
        say(_line(step, result, time.monotonic() - started))
        if not step:
            started = time.monotonic()
        look = step + _next_look(step, time.monotonic() - started)
        if time.monotonic() - started >= options.limit_s and step + 1 < options.steps:
            result.outcome = f"stopped after {step + 1} steps"
            return


def _step(
    training: Training, batch: Sequence[torch.Tensor], rate: float, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One step; the loss, and the accuracy if the model has one."""
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(device, dtype=torch.bfloat16):
        found = training.model(*batch)
    loss, accuracy = found if isinstance(found, tuple) else (found, None)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return loss.detach(), accuracy


def warm_up(steps: int) -> int:
    """How many of so many steps do not count."""
    return min(WARM_UP_STEPS, max(1, steps // 3))


def _next_look(step: int, seconds: float) -> int:
    """Steps until the next look: about a second, once a step was made behind the first one."""
    return max(1, min(SAY_EVERY, int(step / max(seconds, 1e-6)))) if step else 1


def _line(step: int, result: Result, seconds: float) -> str:
    right = f", right {statistics.fmean(result.accuracies[-SAY_EVERY:]):.3f}" if result.accuracies else ""
    return f"step {step:4}: loss {result.losses[-1]:.4f}{right}, {seconds:.1f} s"


class Clock:
    """When each step ended: on the device by its own events, which cost the host no waiting."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """A step ends here."""
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        self._times.append(time.perf_counter())

    def steps_ms(self) -> list[float]:
        """From each mark to the next; waits for the device."""
        if not self._cuda:
            return [1e3 * (end - start) for start, end in pairwise(self._times)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(self._marks)]


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def adamw(model: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.Optimizer:
    """Fused AdamW; weight decay for matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=betas, fused=True)


def warmed(rate: float, steps: int) -> Callable[[int], float]:
    """A learning rate that is reached after so many steps."""
    return lambda step: rate * min(1.0, (step + 1) / steps)


def sdpa_backend(options: Options, nheads: int, head_dim: int, *, causal: bool, padded: bool = False) -> str:
    """Which of torch's backends serves attention, by its name there; for the others, their own name."""
    if options.attention != "sdpa":
        return options.attention
    from torch.nn.attention import SDPBackend

    batch = options.tokens // options.seqlen
    shape = (batch, nheads, options.seqlen, head_dim)
    q = torch.empty(shape, dtype=torch.bfloat16, device=options.device, requires_grad=True)
    mask = torch.ones(batch, 1, 1, options.seqlen, dtype=torch.bool, device=options.device) if padded else None
    return SDPBackend(torch._fused_sdp_choice(q, q, q, mask, is_causal=causal)).name.lower()


def add_arguments(parser: argparse.ArgumentParser, attentions: Sequence[str], *, steps: int) -> None:
    """The options that every example has."""
    parser.add_argument("--attention", choices=sorted(attentions), default="flashgen")
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="compile the blocks and the loss with torch.compile")
    parser.add_argument("--seed", type=int, default=1337, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="end it so long after its first step")
    parser.add_argument("--report", type=Path, help="write losses, times and memory to this JSON file")


def common(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Options` that `add_arguments` asks for."""
    return {
        "attention": given.attention,
        "steps": given.steps,
        "compile": given.compile,
        "seed": given.seed,
        "limit_s": given.limit_seconds,
    }


def finish(result: Result, report: Path | None) -> int:
    """Say what a run found, and write it down if `report` names a file; 0 is done, 1 if it ended early."""
    if report is not None:
        report.write_text(json.dumps(asdict(result) | {"tokens_per_s": result.tokens_per_s, "step_ms": result.step_ms}))
    rate = f"{result.tokens_per_s:.0f} tokens/s, {result.step_ms:.1f} ms a step" if result.step_ms else "no times"
    last = f"loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}, " if result.losses else ""
    name = f"{result.attention} ({result.backend}), seqlen {result.seqlen}{', compiled' if result.compiled else ''}"
    print(f"{name}: {rate}, {last}peak {result.peak_gib:.2f} GiB, {result.outcome}")
    return 0 if result.outcome == "done" else 1
