"""Train GPT-2 (124M) on text that ships with Python, with the attention of your choice.

python examples/train_gpt2.py --attention flashgen --seqlen 4096 --steps 200 --compile

A step sees 16384 tokens, whatever the sequence length is, or one sequence that is longer. Runs with the same seed and
length start from the same weights and see the same batches, so their losses can be compared. bf16 autocast, fp32
weights, fused AdamW, clipped gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import loop
import torch
from attentions import CAUSAL, recomputed
from corpus import load_text
from gpt2 import Gpt2, Shape
from loop import Result, Say, Training

TOKENS = 16384
"""Tokens of a step, where a sequence is not longer."""

RATE, RATE_STEPS = 6e-4, 100
"""The learning rate of GPT-2 124M, reached after so many steps."""

RECOMPUTED = ", attention recomputed"
"""The end of the outcome of a run with `recompute`."""


@dataclass(frozen=True)
class Options(loop.Options):
    """What a run is. With `recompute`, attention is computed again in the backward pass, and keeps q, k and v alone."""

    tokens: int = TOKENS
    shape: Shape = field(default_factory=Shape)
    recompute: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 is done, 1 if the run ended early."""
    options, report = _options(arguments)
    return loop.finish(train(options, say=lambda line: print(line, flush=True)), report)


def train(options: Options, *, say: Say = lambda line: None) -> Result:
    """Train for a few steps."""
    shape = options.shape
    backend = loop.sdpa_backend(options, shape.nheads, shape.width // shape.nheads, causal=True)
    result = loop.train(options, backend, lambda: _training(options), say=say)
    if options.recompute and result.losses:
        result.outcome += RECOMPUTED
    return result


def tokens_of(seqlen: int) -> int:
    """Tokens of a step with sequences of this length."""
    return max(TOKENS, seqlen)


def _training(options: Options) -> Training:
    torch.manual_seed(options.seed)
    attention = CAUSAL[options.attention]
    with torch.device(options.device):
        model = Gpt2(options.shape, recomputed(attention) if options.recompute else attention)
    optimizer = loop.adamw(model, betas=(0.9, 0.95), weight_decay=0.1)  # as nanoGPT has it
    if options.compile:
        model.compile_parts()
    data = batches(load_text(), options.seqlen, options.tokens // options.seqlen, options.seed)
    return Training(model=model, optimizer=optimizer, batches=data, rate=loop.warmed(RATE, RATE_STEPS))


def batches(text: torch.Tensor, seqlen: int, batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets), each (batch, seqlen) int64: pieces of the text from random places."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(seqlen + 1)
    while True:
        starts = torch.randint(len(text) - seqlen - 1, (batch,), generator=generator)
        pieces = text[starts[:, None] + within].long()
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def _options(arguments: list[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    loop.add_arguments(parser, list(CAUSAL), steps=200)
    parser.add_argument(
        "--seqlen", type=int, default=1024, help=f"a divisor of {TOKENS}, or more (default: %(default)s)"
    )
    parser.add_argument("--recompute", action="store_true", help="compute attention again in the backward pass")
    given = parser.parse_args(arguments)
    if given.seqlen < 1 or (given.seqlen < TOKENS and TOKENS % given.seqlen):
        parser.error(f"--seqlen is a divisor of {TOKENS}, or more, got {given.seqlen}")
    if not torch.cuda.is_available():
        parser.error("this trains on a GPU, and torch sees none")
    options = Options(
        seqlen=given.seqlen,
        tokens=tokens_of(given.seqlen),
        shape=Shape(seqlen=given.seqlen),
        recompute=given.recompute,
        **loop.common(given),
    )
    return options, given.report


if __name__ == "__main__":
    sys.exit(main())
