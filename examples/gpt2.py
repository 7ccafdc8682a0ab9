"""GPT-2 (Radford et al., 2019) in plain PyTorch, with the attention function as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from attentions import CausalAttention
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are GPT-2's with 124M parameters, its vocabulary padded to whole tiles."""

    layers: int = 12
    nheads: int = 12
    width: int = 768
    vocabulary: int = 50304
    seqlen: int = 1024


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a layer norm and around which the residual stream flows."""

    def __init__(self, shape: Shape, attention: CausalAttention) -> None:
        super().__init__()
        self.nheads, self.attention = shape.nheads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, width) to the same."""
        batch, seqlen, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, seqlen, 3, self.nheads, width // self.nheads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(batch, seqlen, width)
        x = x + self.project(mixed)
        hidden = functional.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        return x + self.narrow(hidden)


class Gpt2(nn.Module):
    """The whole model, from tokens to the loss of the next one."""

    def __init__(self, shape: Shape, attention: CausalAttention) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.seqlen, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(self._initialise)
        with torch.no_grad():  # what the residual stream adds up keeps its size
            for block in self.blocks:
                for last in (block.project, block.narrow):
                    last.weight.normal_(std=0.02 / math.sqrt(2 * shape.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy in nats of `targets`, both (batch, seqlen) int64."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The head, whose weights are those of the token embedding, and the loss."""
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def compile_parts(self) -> None:
        """Compile a block once for all of them, and the head with the loss: a tenth of the time of the whole model."""
        for block in self.blocks:
            block.compile()
        self.loss = torch.compile(self.loss)  # type: ignore[method-assign]
