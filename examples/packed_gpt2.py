"""Train GPT-2 (124M) on documents of different lengths that are packed without padding.

python examples/packed_gpt2.py --attention flashgen --steps 200
python examples/packed_gpt2.py --device cpu --attention reference --steps 3 --tokens 256 --longest 128 --layers 1

A step sees a fixed number of tokens: documents one behind the other in one row, the last one cut. Positions restart
with each document, no query sees a key of another one, and no token is predicted from the document before it. `padded`
and `flex` compute the same: one document a batch element with SDPA, and one row with a mask of documents. Runs with the
same seed see the same documents. bf16 autocast, fp32 weights, fused AdamW, clipped gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import loop
import torch
from corpus import load_text
from gpt2 import Gpt2, Shape
from loop import Result, Say, Training
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import flashgen
from flashgen import reference

TOKENS, LONGEST = 16384, 1024
SHORTEST = 16
"""Bytes of a document, or less where the last one is cut."""

RATE, RATE_STEPS = 6e-4, 100
"""The learning rate of GPT-2 124M, reached after so many steps."""

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Documents:
    """Causal attention of (1, nheads, tokens, head_dim) inside documents, which `begin` says for each step."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def begin(self, ends: Tensor) -> None:
        """The next step's documents: where each begins and where the last one ends, int32 (documents + 1,)."""
        self.ends = ends

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same for every layer of the step."""
        rows = (one[0].transpose(0, 1) for one in (q, k, v))
        return self.attend(*rows).transpose(0, 1)[None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of (tokens, nheads, head_dim)."""
        return flashgen.attention_varlen(q, k, v, self.ends, max_seqlen_q=self.longest, causal=True)


class Reference(Documents):
    """The same in plain torch, on any device."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Documents.attend`."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return reference.attention_varlen(q, k, v, self.ends, max_seqlen_q=self.longest, causal=True)


class Padded(Documents):
    """SDPA with a batch element for each document; what it gathers and scatters is a part of its time."""

    def begin(self, ends: Tensor) -> None:
        """As `Documents.begin`."""
        super().begin(ends)
        lengths = ends.diff()
        document = torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths)
        self.places = document * self.longest + torch.arange(len(document), device=ends.device) - ends[document]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Documents.attend`."""
        batch = len(self.ends) - 1

        def padded(one: Tensor) -> Tensor:
            rows = one.new_zeros(batch * self.longest, *one.shape[1:]).index_copy(0, self.places, one)
            return rows.view(batch, self.longest, *one.shape[1:]).transpose(1, 2)

        out = functional.scaled_dot_product_attention(padded(q), padded(k), padded(v), is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)[self.places]


class Flex(Documents):
    """FlexAttention with a mask of documents, whose blocks are found once a step; compiled on a GPU."""

    def begin(self, ends: Tensor) -> None:
        """As `Documents.begin`."""
        super().begin(ends)
        lengths, tokens = ends.diff(), int(ends[-1])
        document = torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths)

        def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (document[i] == document[j]) & (i >= j)

        self.mask = flex.create_block_mask(same, None, None, tokens, tokens, device=ends.device.type)
        self.function = COMPILED_FLEX if ends.is_cuda else flex.flex_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Documents`."""
        out = self.function(q, k, v, block_mask=self.mask)
        assert isinstance(out, Tensor)
        return out


COMPILED_FLEX = torch.compile(flex.flex_attention, dynamic=False)
ATTENTIONS = {"flashgen": Documents, "padded": Padded, "flex": Flex, "reference": Reference}


@dataclass(frozen=True)
class Options(loop.Options):
    """What a run is; `seqlen` is the longest document."""

    tokens: int = TOKENS
    shape: Shape = field(default_factory=Shape)


class PackedGpt2(Gpt2):
    """GPT-2 on one row of documents."""

    def __init__(self, shape: Shape, attention: Documents) -> None:
        super().__init__(shape, attention)
        self.documents = attention

    def forward(self, inputs: Tensor, targets: Tensor, positions: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        """The mean cross-entropy in nats of `targets`; all but `ends` are (tokens,) int64."""
        self.documents.begin(ends)
        x = (self.tokens(inputs) + self.positions(positions))[None]
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets[None])


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 is done, 1 if the run ended early."""
    options, report = _options(arguments)
    return loop.finish(train(options, say=lambda line: print(line, flush=True)), report)


def train(options: Options, *, say: Say = lambda line: None) -> Result:
    """Train for a few steps."""
    return loop.train(options, options.attention, lambda: _training(options), say=say)


def _training(options: Options) -> Training:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = PackedGpt2(options.shape, ATTENTIONS[options.attention](options.seqlen))
    optimizer = loop.adamw(model, betas=(0.9, 0.95), weight_decay=0.1)
    data = batches(load_text(), options.seqlen, options.tokens, options.seed)
    return Training(model=model, optimizer=optimizer, batches=data, rate=loop.warmed(RATE, RATE_STEPS))


def batches(text: Tensor, longest: int, tokens: int, seed: int) -> Iterator[Batch]:
    """Endless (inputs, targets, positions, ends): documents from random places, of which short ones are many.

    A document of n tokens has n inputs and the tokens behind each of them as targets, all its own.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        lengths: list[int] = []
        while sum(lengths) < tokens:
            share = float(torch.rand((), generator=generator)) ** 2
            length = min(longest, SHORTEST + int(share * longest))
            lengths.append(min(length, tokens - sum(lengths)))
        starts = torch.randint(len(text) - longest - 1, (len(lengths),), generator=generator).tolist()
        pieces = [text[start : start + length + 1].long() for start, length in zip(starts, lengths, strict=True)]
        inputs, targets = (torch.cat(parts) for parts in zip(*((one[:-1], one[1:]) for one in pieces), strict=True))
        positions = torch.cat([torch.arange(length) for length in lengths])
        yield inputs, targets, positions, torch.tensor([0, *lengths]).cumsum(0).int()


def _options(arguments: list[str] | None) -> tuple[Options, Path | None]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    loop.add_arguments(parser, list(ATTENTIONS), steps=200)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=LONGEST, help="of a document (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    given = parser.parse_args(arguments)
    if min(given.tokens, given.longest, given.layers) < 1:
        parser.error(f"--tokens, --longest and --layers are at least 1, got {given}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("this trains on a GPU, and torch sees none: --device cpu --attention reference runs anywhere")
    if given.device == "cpu" and given.attention == "flashgen":
        parser.error("flashgen's kernels run on GPUs; --attention reference computes the same on a CPU")
    if given.compile:
        parser.error("documents differ from step to step, so nothing here is compiled but FlexAttention")
    options = Options(
        seqlen=given.longest,
        tokens=given.tokens,
        device=given.device,
        shape=Shape(seqlen=given.longest, layers=given.layers),
        **loop.common(given),
    )
    return options, given.report


if __name__ == "__main__":
    sys.exit(main())
