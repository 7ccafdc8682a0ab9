"""Train GPT-2 (124M) on text that ships with Python, with the attention of your choice.

python examples/train_gpt2.py --attention flashgen --seqlen 4096 --steps 200 --compile

A step sees 16384 tokens, whatever the sequence length is. Runs with the same seed and length start from the same
weights and see the same batches, so their losses can be compared. bf16 autocast, fp32 weights, fused AdamW, clipped
gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from gpt2 import Attention, Gpt2, Shape
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = 16384
"""Tokens of a step."""

WARM_UP_STEPS = 10
"""Steps without a time: kernels are compiled and loaded, and the clock of the card settles."""

SAY_EVERY = 20
"""Steps between two looks at the loss, for each of which the host waits."""

RATE, RATE_STEPS = 6e-4, 100
"""The learning rate of GPT-2 124M, reached after so many steps."""


@dataclass
class Result:
    """One run. `outcome` says why it ended early, if it did: what there is of it counts nevertheless.

    Times of single steps are in ms, without those of the warm-up; `peak_gib` is the most memory that was allocated at a
    time, less what was there before the run.
    """

    attention: str
    backend: str
    seqlen: int
    compiled: bool
    outcome: str = "done"
    losses: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0

    @property
    def step_ms(self) -> float | None:
        """The median time of a step."""
        return statistics.median(self.steps_ms) if self.steps_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that training sees in a second, at the median step."""
        return TOKENS / self.step_ms * 1e3 if self.step_ms else None


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
    tokens: int = TOKENS
    shape: Shape = field(default_factory=Shape)


def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The textbook's: all scores in memory."""
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend | None = None
) -> torch.Tensor:
    """Torch's own, on the backend that it chooses or on the one that is named."""
    if backend is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def flashgen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The kernels that flashgen knows for this shape, forward and backward."""
    import flashgen

    out = flashgen.attention(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


ATTENTIONS: dict[str, Attention] = {
    "standard": standard_attention,
    "sdpa": sdpa_attention,
    "sdpa-flash": partial(sdpa_attention, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(sdpa_attention, backend=SDPBackend.CUDNN_ATTENTION),
    "flashgen": flashgen_attention,
}


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 is done, 1 if the run ended early."""
    options, report = _options(arguments)
    result = train(options, say=lambda line: print(line, flush=True))
    if report is not None:
        report.write_text(json.dumps(asdict(result) | {"tokens_per_s": result.tokens_per_s, "step_ms": result.step_ms}))
    rate = f"{result.tokens_per_s:.0f} tokens/s, {result.step_ms:.1f} ms a step" if result.step_ms else "no times"
    last = f"loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}, " if result.losses else ""
    name = f"{result.attention} ({result.backend}), seqlen {result.seqlen}{', compiled' if result.compiled else ''}"
    print(f"{name}: {rate}, {last}peak {result.peak_gib:.2f} GiB, {result.outcome}")
    return 0 if result.outcome == "done" else 1


def train(options: Options, *, say: Callable[[str], None] = lambda line: None) -> Result:
    """Train for a few steps. Running out of memory is an outcome, not an error."""
    result = Result(
        attention=options.attention,
        backend=backend_of(options),
        seqlen=options.seqlen,
        compiled=options.compile,
    )
    cuda, before = options.device == "cuda", 0
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    try:
        _steps(options, result, say)
    except torch.OutOfMemoryError:
        result.outcome = "out of memory"
    if cuda:
        result.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    return result


def _steps(options: Options, result: Result, say: Callable[[str], None]) -> None:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = Gpt2(options.shape, ATTENTIONS[options.attention])
    optimizer = torch.optim.AdamW(_groups(model), lr=RATE, betas=(0.9, 0.95), fused=True)
    if options.compile:
        model.compile_parts()
    data = batches(load_text(), options.seqlen, options.tokens // options.seqlen, options.seed)
    clock, losses, started = Clock(options.device), [], time.monotonic()
    for step in range(options.steps):
        inputs, targets = (_moved(tensor, options.device) for tensor in next(data))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / RATE_STEPS)
        with torch.autocast(options.device, dtype=torch.bfloat16):
            loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.mark()
        if step % SAY_EVERY and step + 1 < options.steps:
            continue  # the host runs ahead of the device
        result.losses += [float(each) for each in losses]
        losses.clear()
        result.steps_ms = clock.steps_ms()[WARM_UP_STEPS:]
        say(f"step {step:4}: loss {result.losses[-1]:.4f}, {time.monotonic() - started:.1f} s")
        if not step:
            started = time.monotonic()
        if time.monotonic() - started >= options.limit_s and step + 1 < options.steps:
            result.outcome = f"stopped after {step + 1} steps"
            return


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


def _groups(model: Gpt2) -> list[dict[str, object]]:
    """Weight decay for matrices only, as nanoGPT has it."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@functools.cache
def load_text() -> torch.Tensor:
    """The sources of Python's own library as bytes, one token each (uint8): 10 MB or more, the same in every run."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in skipped]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    text = b"\n".join(path.read_bytes() for path in sorted(paths))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: torch.Tensor, seqlen: int, batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets), each (batch, seqlen) int64: pieces of the text from random places."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(seqlen + 1)
    while True:
        starts = torch.randint(len(text) - seqlen - 1, (batch,), generator=generator)
        pieces = text[starts[:, None] + within].long()
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def backend_of(options: Options) -> str:
    """Which of torch's backends serves attention, by its name there; for the others, their own name."""
    if options.attention != "sdpa":
        return options.attention
    width = options.shape.width // options.shape.nheads
    q = torch.empty(
        options.tokens // options.seqlen,
        options.shape.nheads,
        options.seqlen,
        width,
        dtype=torch.bfloat16,
        device=options.device,
        requires_grad=True,
    )
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name.lower()


def _options(arguments: list[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="flashgen")
    parser.add_argument("--seqlen", type=int, default=1024, help=f"a divisor of {TOKENS} (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="compile the blocks and the loss with torch.compile")
    parser.add_argument("--seed", type=int, default=1337, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="end it so long after its first step")
    parser.add_argument("--report", type=Path, help="write losses, times and memory to this JSON file")
    given = parser.parse_args(arguments)
    if given.seqlen < 1 or TOKENS % given.seqlen:
        parser.error(f"--seqlen is a divisor of {TOKENS}, got {given.seqlen}")
    if not torch.cuda.is_available():
        parser.error("this trains on a GPU, and torch sees none")
    options = Options(
        attention=given.attention,
        seqlen=given.seqlen,
        steps=given.steps,
        compile=given.compile,
        seed=given.seed,
        limit_s=given.limit_seconds,
        shape=Shape(seqlen=given.seqlen),
    )
    return options, given.report


if __name__ == "__main__":
    sys.exit(main())
