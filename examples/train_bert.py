"""Train BERT-large to find masked tokens in text that ships with Python, with the attention of your choice.

python examples/train_bert.py --attention flashgen --compile [--padded]

A step sees 64 sequences of 512 tokens (words, numbers and signs), 15% of which are masked; with --padded a sequence is
a function or a class, cut at 512 and padded to them. Runs with the same seed start from the same weights and see the
same batches. bf16 autocast, fp32 weights, fused AdamW, clipped gradients, no dropout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import loop
import torch
from attentions import ENCODERS, encoder_attention
from bert import IGNORED, Bert, Shape
from corpus import FIRST_BYTE, MASK, PAD, Corpus, load_corpus
from loop import Batch, Result, Say, Training

TOKENS, SEQLEN = 32768, 512
SHORTEST = 32
"""Tokens of a document that is trained on."""

MASKED, CHANGED = 0.15, (0.8, 0.9)
"""The share of masked tokens. Up to the first share of them become `MASK`, up to the second one a random token, the
others stay."""

RATE, RATE_STEPS = 1e-4, 40
"""The learning rate of BERT, reached after so many steps, which are 10,000 there."""


@dataclass(frozen=True)
class Options(loop.Options):
    """What a run is; `padded`: a document a sequence instead of pieces of the text."""

    seqlen: int = SEQLEN
    tokens: int = TOKENS
    padded: bool = False
    shape: Shape = field(default_factory=Shape)


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 is done, 1 if the run ended early."""
    options, report = _options(arguments)
    return loop.finish(train(options, say=lambda line: print(line, flush=True)), report)


def train(options: Options, *, say: Say = lambda line: None) -> Result:
    """Train for a few steps."""
    shape = options.shape
    width = shape.width // shape.nheads
    backend = loop.sdpa_backend(options, shape.nheads, width, causal=False, padded=options.padded)
    return loop.train(options, backend, lambda: _training(options), say=say)


def _training(options: Options) -> Training:
    corpus = load_corpus(options.shape.vocabulary)  # first of all: it takes seconds
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = Bert(options.shape, encoder_attention(options.attention, compiled=options.compile))
    optimizer = loop.adamw(model, betas=(0.9, 0.999), weight_decay=0.01)
    if options.compile:
        model.compile_parts()
    return Training(
        model=model, optimizer=optimizer, batches=batches(corpus, options), rate=loop.warmed(RATE, RATE_STEPS)
    )


def batches(corpus: Corpus, options: Options) -> Iterator[Batch]:
    """Endless (inputs, places, targets) and, if padded, lengths, as `Bert.forward` takes them."""
    generator = torch.Generator().manual_seed(options.seed)
    batch, seqlen = options.tokens // options.seqlen, options.seqlen
    within = torch.arange(seqlen)
    sizes = corpus.starts.diff()
    documents = torch.nonzero(sizes >= SHORTEST).flatten()
    while True:
        if options.padded:
            chosen = documents[torch.randint(len(documents), (batch,), generator=generator)]
            starts, lengths = corpus.starts[chosen], sizes[chosen].clamp(max=seqlen)
        else:
            starts = torch.randint(len(corpus.tokens) - seqlen, (batch,), generator=generator)
            lengths = torch.full((batch,), seqlen)
        there = within < lengths[:, None]
        last = len(corpus.tokens) - 1
        text = torch.where(there, corpus.tokens[(starts[:, None] + within).clamp(max=last)].long(), PAD)
        masked = masked_tokens(text, lengths, options.shape.vocabulary, generator)
        yield (*masked, lengths.int()) if options.padded else masked


def masked_tokens(
    text: torch.Tensor, lengths: torch.Tensor, vocabulary: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(inputs, places, targets): as many places in every batch, of which a shorter sequence leaves some `IGNORED`."""
    batch, seqlen = text.shape
    most = int(MASKED * seqlen)
    order = torch.rand(batch, seqlen, generator=generator)
    order[torch.arange(seqlen) >= lengths[:, None]] = -1.0  # padding comes last
    places = order.topk(most, dim=1).indices
    counts = torch.arange(most) < (MASKED * lengths[:, None]).int()
    originals = text.gather(1, places)
    chance = torch.rand(batch, most, generator=generator)
    other = torch.randint(FIRST_BYTE, vocabulary, (batch, most), generator=generator)
    changed = torch.where(chance < CHANGED[0], MASK, torch.where(chance < CHANGED[1], other, originals))
    inputs = text.scatter(1, places, torch.where(counts, changed, originals))
    targets = torch.where(counts, originals, IGNORED)
    flat = places + seqlen * torch.arange(batch)[:, None]
    return inputs, flat.flatten(), targets.flatten()


def _options(arguments: list[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    loop.add_arguments(parser, ENCODERS, steps=100)
    parser.add_argument("--padded", action="store_true", help="a document a sequence, with a mask of its keys")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this trains on a GPU, and torch sees none")
    return Options(padded=given.padded, **loop.common(given)), given.report


if __name__ == "__main__":
    sys.exit(main())
