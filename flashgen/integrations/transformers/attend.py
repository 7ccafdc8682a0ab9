"""The attention function that transformers calls: its arguments as those of flashgen's calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.values import Window
from flashgen.integrations.flash_attention import with_rows
from flashgen.integrations.transformers.lengths import Lengths, cached_keys, packed_lengths, within_sequences
from flashgen.integrations.transformers.mask import CompactMask, Visible, checked_mask
from flashgen.integrations.transformers.paged import attend_paged
from flashgen.integrations.transformers.steps import StepMask
from flashgen.runtime.arguments import in_autocast

Tensor = torch.Tensor

MAX_DECODE_HEAD_DIM = 256
"""Of `flashgen.attention_decode`; wider heads are served with a mask of keys."""


CHOSEN = {
    "indices": "the keys that each query sees",
    "block_indices": "the blocks of keys that each query sees",
    "sinks": "a sink of each query",
}
"""What layers of models give beside masks, and what would be another model's output without it."""


FROM_THE_FIRST_KEY = Visible(window=(None, 0))
"""What several queries of a causal module see without a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of a model's layers by `calls`: flashgen, or `flashgen.reference` for tensors of any device."""

    calls: Any
    is_reference: bool = False

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
        max_length_q: int | None = None,
        max_length_k: int | dict[str, int] | None = None,
        cache: Any = None,
        deterministic: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend; weights are never returned, since nothing computes them.

        Args:
            module: the layer's attention: whether it is causal, where nobody else says so.
            query: (batch, nheads, seqlen_q, head_dim), any strides.
            key: (batch, nheads_k, seqlen_k, head_dim), each head once.
            value: (batch, nheads_k, seqlen_k, head_dim_v).
            attention_mask: what `masks.attention_mask` gave, or a tensor of bools (True where attended) or of floats
                (added to scores), of two to four dimensions that broadcast to (batch, heads, seqlen_q, seqlen_k). It
                says everything: a causal mask and a window are in it. None is causal from the top left if `is_causal`,
                and there are several queries. A module that does not say whether it is causal is not, but for packed
                sequences and in a graph of torch.compile, where a causal mask may be None (`masks.attention_mask`).
            dropout: the probability with which a weight is dropped; layers say 0.0 in evaluation.
            scaling: factor of the scores, of any sign; None is head_dim ** -0.5.
            sliding_window: of packed sequences with `cu_seq_lens_q`, which have no mask: the keys that a query sees
                behind it, with its own, and as many in front of it where the layer is not causal.
            softcap: of the scores.
            is_causal: in place of the module's.
            s_aux: sinks, (nheads,).
            position_bias: added to the scores, up to four dimensions.
            cu_seq_lens_q: where packed sequences begin, with the three that follow.
            cu_seq_lens_k: the same of their keys.
            max_length_q: the most queries of one.
            max_length_k: the most keys of one.
            cache: of continuous batching.
            deterministic: for gradients with the same bits every time.
            **others: of other attention functions.

        Returns:
            (batch, seqlen_q, nheads, head_dim_v), contiguous, and None.

        Raises:
            UnsupportedError: something is asked for that flashgen does not compute, or the tensors are not on a GPU.
            WorkloadError: a mask is none of the above.
        """
        self._refuse(query, others)
        query, scaling = _with_positive_scale(query, scaling)
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        has_lengths = None not in lengths
        usual = has_lengths or torch.compiler.is_compiling()
        causal = getattr(module, "is_causal", usual) if is_causal is None else is_causal
        scores: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
        if s_aux is not None:
            scores["sinks"] = s_aux if s_aux.dtype == query.dtype else s_aux.float()
        if deterministic:
            scores["deterministic"] = True
        if dropout:
            scores["dropout_p"] = dropout
        if cache is not None:
            _refuse_packed_bias(position_bias)
            found = attend_paged(
                self.calls, module, (query, key, value), cache, lengths, sliding_window, scores, others
            )
            return found, None
        # here, because steps of decoding are not cast: elsewhere that would copy a cache
        query, key, value, sinks = in_autocast(query, key, value, scores.get("sinks"))
        scores |= {} if sinks is None else {"sinks": sinks}
        if isinstance(attention_mask, (CompactMask, StepMask)) and not torch.compiler.is_compiling():
            attention_mask = attention_mask.materialized() if attention_mask.is_changed else attention_mask
        if has_lengths and not isinstance(attention_mask, Tensor):
            edge = sliding_window - 1 if sliding_window else None
            window = (edge, None if causal else edge)
            found = self._packed(query, key, value, lengths, causal, window, position_bias, scores)
        elif isinstance(attention_mask, CompactMask):
            visible = attention_mask.visible
            given = lengths if has_lengths and visible.keys is None else None
            found = self._compact(query, key, value, visible, given, position_bias, scores)
        elif isinstance(attention_mask, StepMask):
            found = self._step(query, key, value, attention_mask, position_bias, scores)
        elif attention_mask is None:
            found = self._unmasked(query, key, value, causal, position_bias, scores)
        else:
            mask = checked_mask(attention_mask)
            if has_lengths and cu_seq_lens_q is not None and query.shape[2] == key.shape[2]:
                mask = within_sequences(mask, cu_seq_lens_q, (query.shape[0], query.shape[2]))
            found = self._dense(query, key, value, bias=position_bias, mask=mask, **scores)
        return found, None

    def _refuse(self, query: Tensor, others: dict[str, Any]) -> None:
        for name in ("output_attentions", "head_mask"):
            if others.get(name) is not None and others[name] is not False:
                raise UnsupportedError(
                    f"flashgen computes no matrix of attention weights, which {name} needs: load the model with "
                    "attn_implementation='eager'"
                )
        for name, meaning in CHOSEN.items():
            if others.get(name) is not None:
                raise UnsupportedError(
                    f"this model gives its attention {meaning} as {name}, which flashgen does not compute: load the "
                    "model with attn_implementation='eager'"
                )
        if query.device.type == "cpu" and not self.is_reference:
            raise UnsupportedError(
                "flashgen's kernels take tensors of a GPU, and this model is on the CPU: register(reference=True) "
                "computes there, exact and slow"
            )

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, **scores: Any) -> Tensor:
        """`attention` of tensors with heads before rows, with a mask of bools or floats."""
        if mask is not None and mask.dtype != torch.bool:
            bias = scores.get("bias")
            scores["bias"] = mask if bias is None else bias + mask
            mask = None
        rows = _rows(query, key, value)
        found: Tensor = self.calls.attention(*rows, layout="bshd", mask=mask, **scores)
        return found

    def _unmasked(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None, scores: dict[str, Any]
    ) -> Tensor:
        """Without a mask: as SDPA's, one query sees all keys, several ones of a causal module those from the first on.

        The keys behind are slots of a static cache that nothing was written to.
        """
        rows = query.shape[2]
        if not (causal and rows > 1):
            return self._dense(query, key, value, causal=False, bias=bias, **scores)
        return self._compact(query, key, value, FROM_THE_FIRST_KEY, None, bias, scores)

    def _compact(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visible,
        lengths: Lengths | None,
        bias: Tensor | None,
        scores: dict[str, Any],
    ) -> Tensor:
        """With a mask that is known by what it means, and with lengths of packed sequences where they are given."""
        left, right = visible.window
        if lengths is None and visible.sequences is not None:
            lengths = packed_lengths(visible)
        if lengths is not None:
            causal, window = right == 0, (left, None if right == 0 else right)
            return self._packed(query, key, value, lengths, causal, window, bias, scores)
        offset, keys = visible.offset, visible.keys
        if isinstance(offset, Tensor):
            offset = offset.to(device=query.device, dtype=torch.int32).expand(max(len(query), len(key)))
        elif right is not None:
            end = max(0, min(key.shape[2], offset + query.shape[2] + right))
            key, value = key[:, :, :end], value[:, :, :end]
            bias = bias if bias is None else bias[..., :end]
            keys = None if keys is None else keys[:, :end]
        # a step of decoding has its last query at the last key, and sees nothing behind it or everything
        is_step = visible.window == (None, None) or (
            right in (None, 0)
            and type(offset) is int
            and offset + query.shape[2] == key.shape[2]
            and (right is None or offset > 0 or keys is not None)
        )
        if is_step and bias is None and "dropout_p" not in scores and self._can_decode(query, key, value):
            cached = cached_keys(visible, key.shape[2])
            if cached is not None:
                seqlens, pad = cached
                return self._decoded(
                    query, key, value, seqlens, leftpad=pad, causal=right == 0, window=(left, None), **scores
                )
        where: dict[str, Any] = {"window": visible.window}
        if right == 0:
            where = {"causal": True, "window": (left, None)}
        if visible.window != (None, None) and not (type(offset) is int and offset == key.shape[2] - query.shape[2]):
            where["q_offset"] = offset
        mask = None if keys is None else keys[:, None, None, :]
        return self._dense(query, key, value, bias=bias, mask=mask, **where, **scores)

    def _step(
        self, query: Tensor, key: Tensor, value: Tensor, mask: StepMask, bias: Tensor | None, scores: dict[str, Any]
    ) -> Tensor:
        """One query of each sequence over a static cache, whose lengths stay on the device."""
        if bias is not None or "dropout_p" in scores or not self._can_decode(query, key, value):
            return self._dense(query, key, value, bias=bias, mask=mask.materialized(), **scores)
        return self._decoded(
            query, key, value, mask.seqlens, leftpad=mask.leftpad, causal=True, window=(mask.left, None), **scores
        )

    def _can_decode(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether `attention_decode` serves queries like these."""
        is_served = self.is_reference or (
            query.dtype in (torch.bfloat16, torch.float16)
            and min(query.shape[3], value.shape[3]) >= 16
            and max(query.shape[3], value.shape[3]) <= MAX_DECODE_HEAD_DIM
        )
        return (
            is_served
            and query.shape[2] <= MAX_SEQLEN_Q
            and query.shape[2] <= key.shape[2]
            and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
        )

    def _decoded(self, query: Tensor, key: Tensor, value: Tensor, seqlens: Tensor, **call: Any) -> Tensor:
        """A step of decoding, where padding is in front, of which nothing is read."""
        call.pop("deterministic", None)
        found: Tensor = self.calls.attention_decode(*_rows(query, key, value), seqlens, **call)
        return found

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Lengths,
        causal: bool,
        window: Window,
        bias: Tensor | None,
        scores: dict[str, Any],
    ) -> Tensor:
        """Packed sequences, across batch elements."""
        _refuse_packed_bias(bias)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in with_rows(query, key, value))
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
        found: Tensor = self.calls.attention_varlen(
            *rows,
            cu_seqlens_q.to(torch.int32),
            cu_seqlens_k.to(torch.int32),
            max_seqlen_q=int(max_seqlen_q),
            max_seqlen_k=int(max_seqlen_k),
            causal=causal,
            window=window,
            **scores,
        )
        return found.view(query.shape[0], query.shape[2], *found.shape[1:])


def _rows(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Tensors with rows before heads, and learned queries of a batch of one for each of the keys, as for SDPA."""
    batch = len(key) if len(query) == 1 else len(query)
    return [
        x.transpose(1, 2).expand(batch, -1, -1, -1) if len(x) == 1 else x.transpose(1, 2)
        for x in with_rows(query, key, value)
    ]


def _with_positive_scale(query: Tensor, scaling: float | None) -> tuple[Tensor, float | None]:
    """Queries and a factor of the same scores, where kernels take the factor: theirs is above 0, SDPA's is any."""
    if not isinstance(scaling, (int, float)) or not scaling <= 0:
        return query, scaling
    return (-query, -scaling) if scaling else (query * 0, None)


def _refuse_packed_bias(bias: Tensor | None) -> None:
    if bias is not None:
        raise UnsupportedError("flashgen takes no position bias of packed sequences: pad them instead")
