"""Ring attention: keys and values of every rank pass all ranks, while each computes with those that it holds.

Liu et al. 2023, Ring Attention with Blockwise Transformers for Near-Infinite Context (arXiv 2310.01889). A rank holds
two parts of keys and values at a time, and merges the states of blocks by their LSEs in fp32. In the backward pass the
gradients of keys and values travel behind them, each computed by the output and the LSE over all keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.values import Features
from flashgen.integrations.torch.sequence_parts import Block
from flashgen.runtime.autograd.ops import NO_DOUBLE_BACKWARD, attention_backward_op
from flashgen.runtime.ops.keys import is_transformed
from flashgen.runtime.ops.schemas import DIFFERENTIATED, GRADIENT_FIELDS

Tensor = torch.Tensor
Steps = tuple[tuple[Block, ...], ...]


class Exchange(Protocol):
    """How ranks pass tensors on."""

    ranks: int

    def start(self, tensors: Sequence[Tensor], shift: int) -> Any:
        """Send tensors `shift` ranks on, and receive as many of the same shapes from as far behind.

        What is returned has a `wait`, which returns those that arrived. Until then those that were sent stay as they
        are.
        """


class GroupExchange:
    """Between the processes of a group of `torch.distributed`, by its sends and receives."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist, self.group = dist, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def start(self, tensors: Sequence[Tensor], shift: int) -> _Transfer:
        """As of `Exchange`: contiguous tensors, all sends and receives in one batch."""
        dist, received = self._dist, [torch.empty_like(x) for x in tensors]
        there, here = (dist.get_global_rank(self.group, (self.rank + n) % self.ranks) for n in (shift, -shift))
        operations = [dist.P2POp(dist.isend, x, there, self.group) for x in tensors]
        operations += [dist.P2POp(dist.irecv, x, here, self.group) for x in received]
        return _Transfer(dist.batch_isend_irecv(operations), list(tensors), received)


class _Transfer(NamedTuple):
    works: list[Any]
    sent: list[Tensor]
    received: list[Tensor]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


class ScoreOptions(NamedTuple):
    """What a call says about scores, beside q, k and v."""

    causal: bool
    softmax_scale: float | None
    features: Features
    """Window, softcap and sinks; a sink belongs to the block with a row's own key, and to no other."""
    deterministic: bool

    def features_of(self, block: Block) -> Features:
        """The features of one block."""
        window = (None, None) if block.q_offset is None else self.features.window
        return replace(self.features, window=window, sinks=self.features.sinks if block.has_own_keys else None)

    def causal_in(self, block: Block) -> bool:
        """Whether one block has a causal mask."""
        return self.causal and block.q_offset is not None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, steps: Steps, options: ScoreOptions) -> Tensor:
    """The output of this rank's rows over the keys of all ranks, with gradients.

    Args:
        q: (batch, nheads, seqlen, head_dim) of this rank.
        k: (batch, nheads_k, seqlen, head_dim).
        v: (batch, nheads_k, seqlen, head_dim_v).
        exchange: between the ranks.
        steps: of this rank, as `ring_steps` lists them.
        options: of the call.
    """
    if is_transformed():
        raise UnsupportedError(
            'context parallel attention by method="ring" has no gradient under transforms of torch.func; by '
            '"all_gather" it has'
        )
    found: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q, k, v, options.features.sinks, exchange, steps, options
    )
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        exchange: Exchange,
        steps: Steps,
        options: ScoreOptions,
    ) -> Tensor:
        k, v = k.contiguous(), v.contiguous()
        out, lse = ring_forward(q, k, v, exchange, steps, options)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.others = exchange, steps, options._replace(features=replace(options.features, sinks=None))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_DOUBLE_BACKWARD)
        q, k, v, out, lse, sinks = ctx.saved_tensors
        exchange, steps, options = ctx.others
        options = options._replace(features=replace(options.features, sinks=sinks))
        found = ring_backward(dout, q, k, v, out, lse, exchange, steps, options)
        return *found, None, None, None


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, steps: Steps, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Output in the dtype of q, and LSE, of this rank's rows; keys and values are contiguous."""
    held: Sequence[Tensor] = (k, v)
    state: tuple[Tensor, Tensor] | None = None
    for number, blocks in enumerate(steps, 1):
        arriving = exchange.start(held, 1) if number < len(steps) else None
        for block in blocks:
            state = _merged(state, q.shape[2], block.rows, _block_forward(q, held[0], held[1], block, options))
        held = arriving.wait() if arriving is not None else held
    assert state is not None  # a rank always holds its own keys first
    return state[0].to(q.dtype), state[1]


def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    exchange: Exchange,
    steps: Steps,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of this rank's q, k and v, and its part of that of the sinks, None where there are none."""
    rows = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q, out))
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, sums = torch.zeros_like(q, dtype=wide), [torch.zeros_like(x, dtype=wide) for x in (k, v)]
    sinks = options.features.sinks
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
    held: Sequence[Tensor] = (k, v)
    following: Any = None
    for number, blocks in enumerate(steps, 1):
        arriving = exchange.start(held, 1) if number < len(steps) else None
        found = [(block, _block_backward(rows, held, lse, block, options)) for block in blocks]
        # what other ranks have added to the gradients of the keys and values that are held arrives behind these
        sums = sums if following is None else following.wait()
        for block, (of_q, of_k, of_v, more) in found:
            dq[:, :, block.rows] += of_q
            sums[0][:, :, block.keys] += of_k
            sums[1][:, :, block.keys] += of_v
            dsinks = dsinks if dsinks is None or more is None else dsinks + more
        if arriving is not None:
            following, held = exchange.start(sums, 1), arriving.wait()
    home = (1 - len(steps)) % exchange.ranks
    dk, dv = exchange.start(sums, home).wait() if home else sums
    of_sinks = None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks


def _merged(
    state: tuple[Tensor, Tensor] | None, length: int, rows: slice, found: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Output and LSE of all rows over the keys that they have met, with those of some rows over other keys."""
    out, lse = found[0].to(torch.promote_types(found[0].dtype, torch.float32)), found[1]
    if state is None and out.shape[2] == length:
        return out, lse
    if state is None:
        state = out.new_zeros((*out.shape[:2], length, out.shape[3])), lse.new_full((*lse.shape[:2], length), -math.inf)
    merged = flashgen.merge_states([state[0][:, :, rows], out], [state[1][:, :, rows], lse])
    state[0][:, :, rows], state[1][:, :, rows] = merged
    return state


def _block_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Output and LSE of the rows of a block over its keys."""
    features = options.features_of(block)
    return flashgen.attention(
        q[:, :, block.rows],
        k[:, :, block.keys],
        v[:, :, block.keys],
        causal=options.causal_in(block),
        q_offset=block.q_offset or None,  # 0 is where a mask lies by itself: the runs of a block are of one length
        window=features.window,
        softmax_scale=options.softmax_scale,
        softcap=features.softcap,
        sinks=features.sinks,
        return_lse=True,
    )


def _block_backward(
    rows: Sequence[Tensor], held: Sequence[Tensor], lse: Tensor, block: Block, options: ScoreOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What a block adds to the gradients of q, k, v and the sinks, by the output and the LSE over all keys."""
    dout, q, out = (x[:, :, block.rows] for x in rows)
    k, v = (x[:, :, block.keys] for x in held)
    features = options.features_of(block)
    needs = [name == "sinks" and features.sinks is not None for name in GRADIENT_FIELDS]
    numbers = options.causal_in(block), options.softmax_scale, False, block.q_offset or None, None
    dq, dk, dv, *others = attention_backward_op(
        *(dout, None, q, k, v, out, lse[:, :, block.rows].contiguous(), *numbers),
        *DIFFERENTIATED.flat(features, options.deterministic, *needs),
    )
    return dq, dk, dv, None if features.sinks is None else others[GRADIENT_FIELDS.index("sinks")]
