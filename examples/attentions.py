"""Attention by its name on a command line: causal for GPT-2, and without a mask or with padded keys for encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

CausalAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q, k and v, each (batch, nheads, seqlen, head_dim)."""

Padding = Any
"""What an attention wants to know of padding, or None: a mask (batch, 1, 1, seqlen), true where a key counts, or
FlexAttention's block mask."""


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Padding = None, *, causal: bool = False
) -> torch.Tensor:
    """The textbook's: all scores in memory."""
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if padding is not None:
        scores = scores.masked_fill(~padding, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padding: Padding = None,
    *,
    causal: bool = False,
    backend: SDPBackend | None = None,
) -> torch.Tensor:
    """Torch's own, on the backend that it chooses or on the one that is named."""
    if backend is None:
        return functional.scaled_dot_product_attention(q, k, v, padding, is_causal=causal)
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, padding, is_causal=causal)


def flashgen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Padding = None, *, causal: bool = False
) -> torch.Tensor:
    """The kernels that flashgen knows for this shape, forward and backward."""
    import flashgen

    out = flashgen.attention(q, k, v, causal=causal, mask=padding)
    assert isinstance(out, torch.Tensor)
    return out


def recomputed(attention: CausalAttention) -> CausalAttention:
    """The same attention, which keeps q, k and v and computes all else again in the backward pass."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)

    def recompute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(out, torch.Tensor)
        return out

    return recompute


BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}

ANY: dict[str, Callable[..., torch.Tensor]] = {
    "standard": standard_attention,
    "sdpa": sdpa_attention,
    **{name: partial(sdpa_attention, backend=backend) for name, backend in BACKENDS.items()},
    "flashgen": flashgen_attention,
}

CAUSAL: dict[str, CausalAttention] = {name: partial(attention, causal=True) for name, attention in ANY.items()}

FLEX = "flex"
ENCODERS = (*ANY, FLEX)


@dataclass(frozen=True)
class EncoderAttention:
    """Attention of every query to every key that is no padding.

    `call` takes q, k and v, each (batch, nheads, seqlen, head_dim), and what `padding` made of the lengths, int32
    (batch,), and of seqlen: once for all layers of a step.
    """

    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Padding], torch.Tensor]
    padding: Callable[[torch.Tensor, int], Padding]


def encoder_attention(name: str, *, compiled: bool = False) -> EncoderAttention:
    """The attention of this name, one of `ENCODERS`; where its caller is not `compiled`, FlexAttention is by itself."""
    if name != FLEX:
        return EncoderAttention(call=ANY[name], padding=key_mask)
    from torch.nn.attention.flex_attention import flex_attention

    function = flex_attention if compiled else torch.compile(flex_attention, dynamic=False)

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Padding = None) -> torch.Tensor:
        out = function(q, k, v, block_mask=padding)
        assert isinstance(out, torch.Tensor)
        return out

    return EncoderAttention(call=flex, padding=BlockMasks())


def key_mask(lengths: torch.Tensor, seqlen: int) -> torch.Tensor:
    """True where a key is no padding, (batch, 1, 1, seqlen)."""
    return (torch.arange(seqlen, device=lengths.device) < lengths[:, None])[:, None, None]


class BlockMasks:
    """Makes FlexAttention's block masks, of one function over one tensor of lengths: a step compiles nothing."""

    def __init__(self) -> None:
        self._lengths: torch.Tensor | None = None
        self._visible: Callable[..., torch.Tensor] | None = None

    def __call__(self, lengths: torch.Tensor, seqlen: int) -> Padding:
        """The block mask of these lengths; it takes the place of the one before."""
        from torch.nn.attention.flex_attention import create_block_mask

        if self._lengths is None or self._visible is None:
            kept = self._lengths = lengths.clone()

            def visible(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
                return j < kept[b]

            self._visible = visible
        self._lengths.copy_(lengths)
        return create_block_mask(self._visible, len(lengths), None, seqlen, seqlen, device=str(lengths.device))
