"""BERT (Devlin et al., 2018) in plain PyTorch, trained to find masked tokens, with its attention as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attentions import EncoderAttention, Padding
from torch import nn
from torch.nn import functional

NORM_EPSILON = 1e-12
IGNORED = -100
"""The target of a place without one."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are BERT-large's, its vocabulary padded to a multiple of 64."""

    layers: int = 24
    nheads: int = 16
    width: int = 1024
    vocabulary: int = 30528
    seqlen: int = 512


class Block(nn.Module):
    """Attention and a feed-forward net, each followed by a layer norm of its sum with the residual stream."""

    def __init__(self, shape: Shape, attention: EncoderAttention) -> None:
        super().__init__()
        self.nheads, self.attend = shape.nheads, attention.call
        self.norm_1, self.norm_2 = (nn.LayerNorm(shape.width, NORM_EPSILON) for _ in range(2))
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor, padding: Padding = None) -> torch.Tensor:
        """(batch, seqlen, width) to the same."""
        batch, seqlen, width = x.shape
        heads = self.qkv(x).view(batch, seqlen, 3, self.nheads, width // self.nheads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attend(q, k, v, padding).transpose(1, 2).reshape(batch, seqlen, width)
        x = self.norm_1(x + self.project(mixed))
        return self.norm_2(x + self.narrow(functional.gelu(self.widen(x))))


class Bert(nn.Module):
    """The whole model, from tokens to the loss of the masked ones. It has no dropout."""

    def __init__(self, shape: Shape, attention: EncoderAttention) -> None:
        super().__init__()
        self.attention = attention
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.seqlen, shape.width)
        self.segments = nn.Embedding(2, shape.width)
        self.norm = nn.LayerNorm(shape.width, NORM_EPSILON)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.transform = nn.Linear(shape.width, shape.width)
        self.last_norm = nn.LayerNorm(shape.width, NORM_EPSILON)
        self.bias = nn.Parameter(torch.zeros(shape.vocabulary))
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self, inputs: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean cross-entropy in nats of the masked tokens.

        Args:
            inputs: (batch, seqlen) int64.
            places: (masked,) int64, of the masked tokens among all batch * seqlen ones.
            targets: (masked,) int64, what stood there; `IGNORED` does not count.
            lengths: (batch,) int32, tokens of each sequence that are no padding; None: all of them.
        """
        seqlen = inputs.shape[1]
        padding = None if lengths is None else self.attention.padding(lengths, seqlen)
        x = self.norm(self.tokens(inputs) + self.positions.weight[:seqlen] + self.segments.weight[0])
        for block in self.blocks:
            x = block(x, padding)
        return self.loss(x, places, targets)

    def loss(self, x: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The head over the masked places, whose weights are those of the token embedding, and the loss."""
        picked = functional.gelu(self.transform(x.flatten(0, 1).index_select(0, places)))
        logits = functional.linear(self.last_norm(picked), self.tokens.weight, self.bias)
        return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED)

    def compile_parts(self) -> None:
        """Compile a block once for all of them, and the head with the loss."""
        for block in self.blocks:
            block.compile()
        self.loss = torch.compile(self.loss)  # type: ignore[method-assign]
