"""flashgen in the place of the FlashAttention-2 that torch carries, by torch's own registry of such implementations.

`torch.nn.attention.activate_flash_attention_impl("flashgen")` then serves the flash backend of SDPA and `varlen_attn`:
the ATen operators behind both are overridden, and `restore_flash_attention_impl` gives them back. Their causal mask is
FlashAttention's, aligned to the bottom right; SDPA itself calls them with other lengths only through `CausalBias`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.values import Features, Window
from flashgen.runtime.arguments import drawn_state
from flashgen.runtime.autograd.ops import attention_backward_op
from flashgen.runtime.ops.backward import is_deterministic
from flashgen.runtime.ops.schemas import DIFFERENTIATED
from flashgen.runtime.varlen.arguments import packed_features

Tensor = torch.Tensor
Optional = Tensor | None

NAME = "flashgen"


def register_flash_impl() -> None:
    """Make "flashgen" known to `torch.nn.attention.activate_flash_attention_impl`; nothing is overridden yet."""
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(NAME, register_fn=override)


@dataclass
class Handle:
    """What torch keeps while the operators are overridden."""

    library: torch.library.Library | None

    def remove(self) -> None:
        """Give torch its operators back."""
        if self.library is not None:
            self.library._destroy()  # type: ignore[no-untyped-call]
        self.library = None


def override(dispatch_key: str = "CUDA") -> Handle:
    """Override the operators for the tensors of a dispatch key, until the handle is removed."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that operators are overridden
        for name, function in _OPERATORS.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, function, dispatch_key)  # type: ignore[no-untyped-call]
    return Handle(library)


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            shown = "a tensor" if isinstance(value, Tensor) else value
            raise UnsupportedError(f"flashgen as torch's flash implementation does not support {name}, got {shown}")


def _window(left: int | None, right: int | None) -> Window:
    return tuple(None if edge is None or edge < 0 else edge for edge in (left, right))  # type: ignore[return-value]


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors with a contiguous last dimension."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def _random(query: Tensor, dropout_p: float) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]:
    """What a call is given for its dropout, and what it returns of it: torch's numbers have no sign.

    These are the seed and the offset in one tensor, what is unused, and the mask for debugging, which is empty.
    """
    state = drawn_state(dropout_p, None, query)
    given = {} if state is None else {"dropout_p": dropout_p, "rng_state": state}
    kept = torch.zeros(2, dtype=torch.int64, device=query.device) if state is None else state
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return given, (kept.view(torch.uint64), unused, query.new_empty(0))


def _features(window: Window, dropout_p: float, rng_state: Tensor) -> Features:
    """Those of the backward pass of such a call."""
    state = rng_state.view(torch.int64) if dropout_p else None
    return Features(window=window, dropout_p=dropout_p, rng_state=state)


@torch.no_grad()
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Optional,
    cum_seq_k: Optional,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Optional = None,
    alibi_slopes: Optional = None,
    block_table: Optional = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_forward`, dense in bshd order or packed; how work is split is else flashgen's."""
    _refuse(return_debug_mask=return_debug_mask)
    q, k, v = _rows(query, key, value)
    dropout, random = _random(query, dropout_p)
    given: dict[str, Any] = {
        "causal": is_causal,
        "softmax_scale": scale,
        "window": _window(window_size_left, window_size_right),
        "alibi_slopes": alibi_slopes,
        "return_lse": True,
        **dropout,
    }
    if cum_seq_q is None:
        _refuse(seqused_k=seqused_k, block_table=block_table)
        out, lse = flashgen.attention(q, k, v, layout="bshd", **given)
    else:
        attend: Any = flashgen.attention_varlen  # whose overloads ask for a flag that is known
        given |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "seqused_k": seqused_k, "block_table": block_table}
        given |= {"deterministic": True} if num_splits == 1 else {}  # torch promises the same bits in every batch
        if block_table is not None and seqused_k is not None:
            cum_seq_k = None  # torch asks for it beside pages, too, where it says nothing
        out, lse = attend(q, k, v, cum_seq_q, cum_seq_k, **given)
    return out, lse, *random


def _forward_into(out: Tensor, *given: Any, **named: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: the LSE."""
    found, lse, *_ = _forward(*given, **named)
    out.copy_(found)
    return lse


@torch.no_grad()
def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Optional,
    cum_seq_k: Optional,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_backward`, dense in bshd order or packed."""
    tensors = _rows(grad_out, query, key, value, out)
    features = _features(_window(window_size_left, window_size_right), dropout_p, rng_state)
    is_packed = cum_seq_q is not None and cum_seq_q.numel() > 0
    if is_packed:
        features = packed_features(features, cum_seq_q, cum_seq_k, None, None, int(max_q), int(max_k))
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
        logsumexp = logsumexp.unsqueeze(0)
    found = _gradients(tensors, logsumexp, is_causal, scale, True, features)
    return tuple(x.squeeze(0) for x in found) if is_packed else found


@torch.no_grad()
def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`, in bhsd order."""
    _refuse(return_debug_mask=return_debug_mask)
    q, k, v = _rows(query, key, value)
    dropout, random = _random(query, dropout_p)
    out, lse = flashgen.attention(q, k, v, causal=is_causal, softmax_scale=scale, return_lse=True, **dropout)
    return out, lse, None, None, query.shape[2], key.shape[2], *random


@torch.no_grad()
def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Optional,
    cum_seq_k: Optional,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_backward`, in bhsd order."""
    features = _features((None, None), dropout_p, philox_seed)
    return _gradients(_rows(grad_out, query, key, value, out), logsumexp, is_causal, scale, False, features)


def _gradients(
    tensors: list[Tensor], lse: Tensor, causal: bool, scale: float | None, bshd: bool, features: Features
) -> tuple[Tensor, ...]:
    """dq, dk and dv from dout, q, k, v and the output."""
    dout, q, k, v, out = tensors
    flat = DIFFERENTIATED.flat(features, is_deterministic())
    dq, dk, dv, *_ = attention_backward_op(dout, None, q, k, v, out, lse, causal, scale, bshd, None, None, *flat)
    return dq, dk, dv


_OPERATORS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
