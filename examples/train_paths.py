"""Train a small encoder to tell whether two dots lie on one path, pixel by pixel: 16384 of them are one sequence.

python examples/train_paths.py --attention flashgen --steps 250 [--distractors 4]

A step sees 8 images that no step saw before, so the accuracy on them is that on images not trained on. The images are
easy ones, which some hundred steps learn; with --distractors a path must be followed, which takes far longer. bf16
autocast, fp32 weights, fused AdamW, clipped gradients.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import loop
import paths
import torch
from attentions import ANY
from gpt2 import Block
from gpt2 import Shape as BlockShape
from loop import Result, Say, Training
from paths import EASY, Images
from torch import nn
from torch.nn import functional

BATCH = 8
RATE, RATE_STEPS = 1e-3, 50
"""The learning rate, reached after so many steps."""

WAVELENGTHS = (4.0, 512.0)
"""In pixels: the shortest and the longest of the waves that the encoding of positions starts from."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the encoder."""

    layers: int = 4
    nheads: int = 4
    width: int = 256


@dataclass(frozen=True)
class Options(loop.Options):
    """What a run is; `seqlen` is the number of pixels."""

    seqlen: int = Images.size**2
    tokens: int = BATCH * Images.size**2
    images: Images = EASY
    shape: Shape = field(default_factory=Shape)


class Classifier(nn.Module):
    """A transformer encoder over pixels, the mean of its outputs, and two classes."""

    def __init__(self, shape: Shape, size: int, attention: str) -> None:
        super().__init__()
        block = BlockShape(layers=shape.layers, nheads=shape.nheads, width=shape.width)
        self.pixels = nn.Embedding(3, shape.width)
        self.positions = nn.Parameter(positions(size, shape.width))
        self.blocks = nn.ModuleList(Block(block, ANY[attention]) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.classes = nn.Linear(shape.width, 2)

    def forward(self, pixels: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of pixels (batch, seqlen) and answers (batch,), int64: the loss in nats, and the share that is right."""
        x = self.pixels(pixels) + self.positions
        for block in self.blocks:
            x = block(x)
        scores = self.classes(self.norm(x).mean(1)).float()
        return functional.cross_entropy(scores, answers), (scores.argmax(1) == answers).float().mean()

    def compile_parts(self) -> None:
        """Compile a block once for all of them."""
        for block in self.blocks:
            block.compile()


def positions(size: int, width: int) -> torch.Tensor:
    """Waves along x and along y, (size * size, width) fp32, as an encoding of positions starts."""
    short, long = WAVELENGTHS
    shares = torch.arange(width // 4) / max(1, width // 4 - 1)
    phases = torch.arange(size)[:, None] * (2 * torch.pi / short) * (short / long) ** shares
    waves = torch.cat([phases.sin(), phases.cos()], dim=1)
    along_x, along_y = waves.repeat(size, 1), waves.repeat_interleave(size, 0)
    return torch.cat([along_x, along_y], dim=1)


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 is done, 1 if the run ended early."""
    options, report = _options(arguments)
    return loop.finish(train(options, say=lambda line: print(line, flush=True)), report)


def train(options: Options, *, say: Say = lambda line: None) -> Result:
    """Train for a few steps."""
    shape = options.shape
    backend = loop.sdpa_backend(options, shape.nheads, shape.width // shape.nheads, causal=False)
    return loop.train(options, backend, lambda: _training(options), say=say)


def _training(options: Options) -> Training:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = Classifier(options.shape, options.images.size, options.attention)
    optimizer = loop.adamw(model, betas=(0.9, 0.98), weight_decay=0.01)
    if options.compile:
        model.compile_parts()
    data = paths.batches(options.images, options.tokens // options.seqlen, options.seed)
    return Training(model=model, optimizer=optimizer, batches=data, rate=loop.warmed(RATE, RATE_STEPS))


def _options(arguments: list[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    loop.add_arguments(parser, list(ANY), steps=250)
    parser.add_argument(
        "--distractors", type=int, help="two paths in every image, and so many without a dot (default: easy images)"
    )
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this trains on a GPU, and torch sees none")
    images = EASY if given.distractors is None else Images(distractors=given.distractors)
    return Options(images=images, **loop.common(given)), given.report


if __name__ == "__main__":
    sys.exit(main())
