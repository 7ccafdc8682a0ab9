"""FlashAttention's arguments as those of flashgen's calls: what versions 2 and 3 of its functions have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

import flashgen
from flashgen.core.checks import is_symbolic, real_number, whole_number
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.pages import PAGES
from flashgen.core.features.values import Window
from flashgen.core.quoting import shown
from flashgen.integrations.cached_rows import first_slots
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.arguments import drawn_state

Tensor = torch.Tensor
OutAndLse = tuple[Tensor, Tensor]
Results = Tensor | tuple[Tensor, Tensor, Tensor]
"""Of version 2: the output, or with it the LSE and `S_dmask`."""

_INTEGERS = (torch.int32, torch.int64)

SCORES = ("softmax_scale", "causal", "softcap", "alibi_slopes")
"""Arguments that mean the same in flashgen's calls, and have the same names."""


def window_of(window_size: Sequence[int | None] | Tensor) -> Window:
    """A window as flashgen has it; a negative edge is unlimited, and so is None.

    Raises:
        WorkloadError: it has not two edges.
    """
    if isinstance(window_size, Tensor) and window_size.dtype == torch.int64 and window_size.device.type == "cpu":
        window_size = window_size.tolist()  # FlashAttention's own tests have such ones
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise WorkloadError(f"window_size is (left, right), got {shown(window_size)}")
    left, right = (_edge(edge) for edge in window_size)
    return left, right


def _edge(edge: Any) -> Any:
    if type(edge) is int or is_symbolic(edge):
        return None if edge < 0 else edge
    if type(edge) is not bool and isinstance(edge, Integral):  # numpy's
        return None if edge < 0 else int(edge)
    return edge


def length_of(longest: Any) -> Any:
    """A bound of lengths as a number: one in a tensor is taken as FlashAttention takes it, which waits for the device.

    What is no number is left to be refused.
    """
    is_number = isinstance(longest, Tensor) and longest.numel() == 1 and longest.dtype in _INTEGERS
    return int(longest) if is_number else longest


def refuse(function: str, given: Mapping[str, object]) -> None:
    """Refuse arguments that ask for what flashgen does not compute: all that are not None.

    Raises:
        UnsupportedError: there is one; the message has its name.
    """
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"flashgen's {function} does not support {name}, got "
                f"{'a tensor' if isinstance(value, Tensor) else shown(value)}"
            )


def with_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose last dimension is contiguous: copies of those where it is not, as FlashAttention makes them.

    Raises:
        WorkloadError: one is no tensor.
    """
    for tensor in tensors:
        check_tensor("q, k or v", tensor)
    return [tensor if not tensor.dim() or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def unpacked(name: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The parts of (..., count, nheads, head_dim), as views: their gradients are those of the whole.

    Raises:
        WorkloadError: it has not so many.
    """
    check_tensor(name, tensor)
    if tensor.dim() < 4 or tensor.shape[-3] != count:
        raise WorkloadError(f"{name} is (..., {count}, nheads, head_dim), got {tuple(tensor.shape)}")
    return tensor.unbind(-3)


def heads_behind(num_heads_q: int, qkv: Tensor) -> int:
    """Heads of k, and as many of v, behind those of q in (batch, seqlen, nheads + 2 * nheads_k, head_dim).

    Raises:
        WorkloadError: what is left is not two equal parts.
    """
    rest = qkv.shape[2] - whole_number("num_heads_q", num_heads_q, 1)
    if rest < 2 or rest % 2:
        raise WorkloadError(
            "qkv with num_heads_q is (batch, seqlen, num_heads_q + 2 * nheads_k, head_dim), got "
            f"{tuple(qkv.shape)} and num_heads_q {num_heads_q}"
        )
    return rest // 2


def dense_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float,
    window_size: Sequence[int | None],
    deterministic: bool,
    return_attn_probs: bool,
    **scores: Any,
) -> Results:
    """What version 2 returns for (batch, seqlen, nheads, head_dim); `scores` are those of `SCORES`."""
    dropout = dropout_of(q, dropout_p, is_known=return_attn_probs)
    given = {"window_size": window_size, **scores, **dropout}
    out, lse = dense(q, k, v, deterministic=deterministic, return_lse=return_attn_probs, **given)
    if not return_attn_probs:
        return out
    return out, blind_rows_at(lse, math.inf), weights_of("dense_weights", out, (q, k), **given)


def packed_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *places: Any,
    dropout_p: float,
    window_size: Sequence[int | None],
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
    **scores: Any,
) -> Results:
    """The same of packed sequences; `places` are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
    dropout = dropout_of(q, dropout_p, is_known=return_attn_probs)
    if block_table is not None:
        if dropout:
            refuse("flash_attn_varlen_func with a block_table", {"dropout_p": dropout_p})
        scores["block_table"] = block_table
    given = {"window_size": window_size, **scores, **dropout}
    named = {"deterministic": deterministic, "return_lse": return_attn_probs, **given}
    if block_table is None:
        out, lse = packed(q, k, v, *places, **named)
    else:
        out, lse = without_backward(lambda: packed(q, k, v, *places, **named), (q, k, v), PAGES.no_gradient)
    if not return_attn_probs:
        return out
    return out, blind_rows_at(lse, math.inf), weights_of("packed_weights", out, (q, k, *places), **given)


def dropout_of(q: Tensor, dropout_p: float, *, is_known: bool) -> dict[str, Any]:
    """Dropout as flashgen's calls have it; `is_known` draws its state beforehand, for whoever looks at weights."""
    if not real_number("dropout_p", dropout_p):
        return {}
    state = None
    if is_known:
        check_tensor("q", q)
        state = drawn_state(dropout_p, None, q)
    return {"dropout_p": dropout_p, "rng_state": state}


def weights_of(
    function: str, out: Tensor, tensors: tuple[Any, ...], *, window_size: Sequence[int | None], **given: Any
) -> Tensor:
    """`S_dmask` of a call that has been served; without dropout an empty tensor."""
    if "dropout_p" not in given:
        return out.new_empty(0)
    from flashgen.integrations import signed_weights

    lengths = map(length_of, tensors)  # the last ones of packed sequences
    found: Tensor = getattr(signed_weights, function)(*lengths, window=window_of(window_size), **given)
    return found


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, window_size: Sequence[int | None], deterministic: bool, **scores: Any
) -> OutAndLse:
    """`flashgen.attention` of (batch, seqlen, nheads, head_dim); `scores` are those of `SCORES`, and `return_lse`."""
    q, k, v = with_rows(q, k, v)
    return both(
        flashgen.attention(q, k, v, layout="bshd", window=window_of(window_size), deterministic=deterministic, **scores)
    )


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    window_size: Sequence[int | None],
    deterministic: bool,
    **scores: Any,
) -> OutAndLse:
    """`flashgen.attention_varlen`; `scores` as for `dense`, and how many rows are used."""
    q, k, v = with_rows(q, k, v)
    check_tensor("cu_seqlens_k", cu_seqlens_k)  # without it, flashgen takes the other one
    scores = {name: in_order(value) for name, value in scores.items()}
    return both(
        flashgen.attention_varlen(
            q,
            k,
            v,
            in_order(cu_seqlens_q),
            in_order(cu_seqlens_k),
            max_seqlen_q=length_of(max_seqlen_q),
            max_seqlen_k=length_of(max_seqlen_k),
            window=window_of(window_size),
            deterministic=deterministic,
            **scores,
        )
    )


def packed_batch(
    tensors: Sequence[Tensor], ends: Tensor | None, longest: Any, rule: str
) -> tuple[Sequence[Tensor], Tensor, Any]:
    """Tensors as packed sequences: where nothing says where they begin, each batch element is one, of all its rows.

    Args:
        tensors: (total, heads, columns) with `ends`, (batch, seqlen, heads, columns) without.
        ends: where sequences begin, and where the last one ends, or None.
        longest: the most rows of a sequence; without effect where `ends` is None.
        rule: what is said of tensors that are not of one batch and seqlen then.

    Returns:
        Tensors (total, heads, columns), where sequences begin, and the most rows of one.

    Raises:
        WorkloadError: without `ends`, tensors have not four dimensions, or not the same batch and seqlen.
    """
    for tensor in tensors:
        check_tensor("q, k or v", tensor)
    if ends is not None:
        return tensors, ends, longest
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(len(shape) != 4 or shape[:2] != shapes[0][:2] for shape in shapes):
        raise WorkloadError(f"{rule}, got {' and '.join(map(str, shapes))}")
    batch, rows = shapes[0][:2]
    return [tensor.flatten(0, 1) for tensor in tensors], first_slots(batch + 1, rows, tensors[0]), rows


def in_order(value: Any) -> Any:
    """A tensor's copy where its last dimension does not lie side by side, as FlashAttention makes it of numbers.

    Rows may be apart, as those of a part of a table are; what is no tensor comes back.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or not value.dim():
        return value  # what has no strides is refused by name where it is read
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def without_backward(call: Callable[[], OutAndLse], tensors: Sequence[object], why: str) -> OutAndLse:
    """What a call returns that has no backward pass; asked for a gradient, it raises `UnsupportedError(why)`.

    Args:
        call: of `tensors`.
        tensors: those that may require a gradient; None and others are passed by.
        why: what is said then.
    """
    asking = [one for one in tensors if isinstance(one, Tensor) and one.requires_grad]
    if not torch.is_grad_enabled() or not asking:
        return call()
    with torch.no_grad():
        out, lse = call()
    if torch.compiler.is_dynamo_compiling():  # which traces no backward pass that raises: no gradient at all
        return out, lse
    found: OutAndLse = _WithoutBackward.apply(why, out, lse, *asking)  # type: ignore[no-untyped-call]
    return found


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, why: str, out: Tensor, lse: Tensor, *tensors: Tensor) -> OutAndLse:
        ctx.why = why
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(ctx.why)


def blind_rows_at(lse: Tensor, value: float) -> Tensor:
    """An LSE with another value than -inf for rows that see no key."""
    return lse.masked_fill(lse == -math.inf, value)


def both(result: Tensor | OutAndLse) -> OutAndLse:
    """The output and the LSE; an empty one where none was asked for, which nobody looks at."""
    return (result, result.new_empty(0)) if isinstance(result, Tensor) else result
