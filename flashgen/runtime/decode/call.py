"""`DecodeCall`: the arguments of one decode call; `CheckedDecode`: what it asks for, checked without a look at data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.checks import flag, whole_number
from flashgen.core.decode_limits import MAX_KEYS, MAX_SEQLEN_Q
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.declaration import CallFacts
from flashgen.core.features.positions import WINDOW, clamp_window
from flashgen.core.features.scores import SOFTCAP
from flashgen.core.features.table import checked, specialization_fields, workload_fields
from flashgen.core.features.table import values as table_values
from flashgen.core.features.values import Features, Window
from flashgen.core.workload import DECODE, Specialization
from flashgen.launch.decode_numbers import DecodeShape, strides_of
from flashgen.launch.feature_arguments import NO_FEATURES
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.arguments import check_scale
from flashgen.runtime.ops.calls import DTYPES, MAX_ROW_STRIDE
from flashgen.runtime.ops.helpers import has_aligned_rows

SPLIT_UNIT = 128
"""What `fixed_split_size` is a multiple of: the most keys of a step that a config may have."""

NO_BACKWARD = "attention_decode has no backward pass: call it under torch.no_grad()"
MAX_PAGE_STRIDE = 2**31
"""In elements, exclusive: a page's number times its stride is a product of two numbers of 32 bits."""

_COMPILED = {field.name for field in fields(Specialization)} - {"window", "offset_tensor", "mods"}
"""Of what features ask for: windows are numbers of a launch here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall:
    """The arguments of `flashgen.attention_decode` under their names there; `features` has those of scores."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seqlens: torch.Tensor
    block_table: torch.Tensor | None = None
    causal: bool = False
    softmax_scale: float | None = None
    features: Features = NO_FEATURES
    leftpad: torch.Tensor | None = None
    batch_idx: torch.Tensor | None = None
    fixed_split_size: int | None = None
    return_lse: bool = False

    @property
    def optional(self) -> dict[str, torch.Tensor | None]:
        """The int32 tensors that a call may have."""
        return {"block_table": self.block_table, "leftpad": self.leftpad, "batch_idx": self.batch_idx}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDecode:
    """A call whose rules hold: what is compiled in, and its numbers."""

    spec: Specialization
    shape: DecodeShape

    @classmethod
    def of(cls, call: DecodeCall, out: torch.Tensor) -> CheckedDecode:
        """Check a call that writes to `out`.

        Raises:
            WorkloadError: shapes, dtypes, strides or arguments break a rule; the message names the rule and the value.
            UnsupportedError: a gradient is asked for.
        """
        facts, features, split_size, softmax_scale = check_call(call)
        (batch, nheads, seqlen_q, seqlen_k), head_dim, table = facts.sizes, call.q.shape[3], call.block_table
        asked = {**workload_fields(features, facts), **specialization_fields(features)}
        spec = Specialization(
            direction=DECODE,
            dtype=DTYPES[call.q.dtype],
            head_dim=head_dim,
            head_dim_v=call.v_cache.shape[3],
            page_size=None if table is None else call.k_cache.shape[1],
            aligned16=all(is_aligned(tensor) for tensor in (call.q, call.k_cache, call.v_cache, out)),
            **{name: value for name, value in asked.items() if name in _COMPILED},
        )
        left, right = window_of(features.window, flag("causal", call.causal), seqlen_q, seqlen_k)
        slopes = features.alibi_slopes
        shape = DecodeShape(
            batch=batch,
            nheads=nheads,
            nheads_k=call.k_cache.shape[2],
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim_v=call.v_cache.shape[3],
            q_strides=strides_of(call.q),
            k_strides=strides_of(call.k_cache),
            v_strides=strides_of(call.v_cache),
            o_strides=strides_of(out),
            num_pages=0 if table is None else call.k_cache.shape[0],
            table_stride=0 if table is None else table.stride(0),
            window_left=left,
            window_right=right,
            split_size=split_size,
            softmax_scale=softmax_scale,
            softcap=features.softcap,
            alibi_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            has_leftpad=call.leftpad is not None,
            has_batch_idx=call.batch_idx is not None,
            has_lse=flag("return_lse", call.return_lse),
        )
        return cls(spec=spec, shape=shape)


def check_call(call: DecodeCall) -> tuple[CallFacts, Features, int, float]:
    """Sizes, features, keys of a fixed split (0 is none) and scale of a call that breaks no rule.

    Asks every rule that needs no memory, so it serves fake tensors, too.

    Raises:
        WorkloadError, UnsupportedError: as `CheckedDecode.of`.
    """
    check_decode_tensors(call)
    batch, seqlen_q, nheads, head_dim = call.q.shape
    facts = CallFacts(q=call.q, sizes=(batch, nheads, seqlen_q, keys_of_a_sequence(call)))
    split_size, scale = _checked_split(call.fixed_split_size), _checked_scale(call.softmax_scale, head_dim)
    return facts, _checked_features(call.features, facts), split_size, scale


def check_decode_tensors(call: DecodeCall) -> None:
    """Refuse tensors that no decode call may have, whatever their sizes are to each other.

    Raises:
        WorkloadError: a type, dtype, device or stride breaks a rule.
        UnsupportedError: a gradient is asked for.
    """
    tensors = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache}
    for name, tensor in {**tensors, "seqlens": call.seqlens}.items():
        check_tensor(name, tensor)
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise WorkloadError(f"{name} has four dimensions, got {tuple(tensor.shape)}")
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != call.q.dtype:
            raise WorkloadError(
                f"q, k_cache and v_cache are all bfloat16 or all float16, got "
                f"{call.q.dtype}, {call.k_cache.dtype} and {call.v_cache.dtype}"
            )
        if tensor.device != call.q.device:
            raise WorkloadError(f"{name} is on the device of q, {call.q.device}, got {tensor.device}")
        _check_rows(name, tensor)
    if call.block_table is not None:
        for name in ("k_cache", "v_cache"):
            _check_pages(name, tensors[name])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        raise UnsupportedError(NO_BACKWARD)
    integers = {"seqlens": call.seqlens, **{n: t for n, t in call.optional.items() if t is not None}}
    for name, tensor in integers.items():
        _check_integers(name, tensor, call.q)


def window_of(window: Window, causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The keys that a query sees before its own place, and behind it."""
    return clamp_window((window[0], 0 if causal else window[1]), seqlen_q, seqlen_k)


def checked_scores(window: Any, softcap: Any) -> tuple[Window, float]:
    """The window and the softcap of a call.

    Raises:
        WorkloadError: one breaks a rule.
    """
    found = []
    for argument, value in zip((*WINDOW.arguments, *SOFTCAP.arguments), (window, softcap), strict=True):
        found.append(argument.check(value) if argument.check else value)
    return found[0], found[1]


def checked_split(size: Any) -> int | None:
    """A `fixed_split_size` as a number, or None.

    Raises:
        WorkloadError: it is neither.
    """
    return None if size is None else whole_number("fixed_split_size", size, SPLIT_UNIT)


def _checked_features(features: Features, facts: CallFacts) -> Features:
    """Those of a call once every rule of the table holds; kernels read numbers of heads without a stride."""
    window, softcap = checked_scores(features.window, features.softcap)
    for value in table_values():
        one = getattr(features, value.name)
        if value.is_tensor and one is not None:
            check_tensor(value.name, one)
            if one.dim() and one.shape[-1] != 1 and one.stride(-1) != 1:
                raise WorkloadError(f"{value.name} is contiguous along the heads, got strides {one.stride()}")
    return checked(replace(features, window=window, softcap=softcap), facts)


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[3] > 1 and tensor.stride(3) != 1:
        raise WorkloadError(f"the last dimension of {name} is contiguous, got strides {tensor.stride()}")
    if tensor.shape[1] > 1 and tensor.stride(1) >= MAX_ROW_STRIDE:
        raise WorkloadError(
            f"rows of {name} lie less than {MAX_ROW_STRIDE} elements apart, got strides {tensor.stride()}"
        )


def _check_pages(name: str, cache: torch.Tensor) -> None:
    first, second = cache.stride()[:2]
    if max(first, cache.shape[1] * second) >= MAX_PAGE_STRIDE:
        raise WorkloadError(
            f"pages of {name} lie less than {MAX_PAGE_STRIDE} elements apart, and so do the ends of one; "
            f"got shape {tuple(cache.shape)}, strides {cache.stride()}"
        )


def _check_integers(name: str, tensor: Any, q: torch.Tensor) -> None:
    check_tensor(name, tensor)
    dims = 2 if name == "block_table" else 1
    if (
        tensor.dtype != torch.int32
        or tensor.device != q.device
        or tensor.dim() != dims
        or tensor.shape[0] != q.shape[0]
    ):
        shape = "(batch, pages)" if dims == 2 else "(batch,)"
        raise WorkloadError(
            f"{name} is int32 {shape} on the device of q, with batch {q.shape[0]} on {q.device}; "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise WorkloadError(f"{name} is contiguous along its last dimension, got strides {tensor.stride()}")


def keys_of_a_sequence(call: DecodeCall) -> int:
    """The keys that a sequence has at most, once all shapes fit together.

    Raises:
        WorkloadError: they do not.
    """
    (batch, seqlen_q, nheads, head_dim), cache, table = call.q.shape, call.k_cache.shape, call.block_table
    if cache[:3] != call.v_cache.shape[:3]:
        raise WorkloadError(
            f"k_cache and v_cache have the same shape but for the last dimension, got {tuple(cache)} and "
            f"{tuple(call.v_cache.shape)}"
        )
    if cache[3] != head_dim:
        raise WorkloadError(f"k_cache has the head_dim of q, {head_dim}, got {cache[3]}")
    if not head_dim or not call.v_cache.shape[3]:
        raise WorkloadError(f"head_dim and head_dim_v must be at least 1, got {head_dim} and {call.v_cache.shape[3]}")
    if not nheads:
        raise WorkloadError(f"q has at least one head, got {tuple(call.q.shape)}")
    if not cache[2] or nheads % cache[2]:
        raise WorkloadError(f"the heads of q are a multiple of those of the caches, got {nheads} and {cache[2]}")
    if not 1 <= seqlen_q <= MAX_SEQLEN_Q:
        raise WorkloadError(f"a decode call has 1 to {MAX_SEQLEN_Q} queries of each sequence, got {seqlen_q}")
    if table is not None and (call.leftpad is not None or call.batch_idx is not None):
        raise WorkloadError("leftpad and batch_idx belong to contiguous caches, got a block_table as well")
    if table is None and call.batch_idx is None and cache[0] != batch:
        raise WorkloadError(
            f"without block_table and batch_idx the caches have a row for each of the {batch} sequences, got {cache[0]}"
        )
    keys = cache[1] if table is None else cache[1] * table.shape[1]
    if cache[0] == 0 or (table is not None and cache[1] == 0):
        keys = 0
    if keys > MAX_KEYS:
        raise WorkloadError(f"a sequence has at most {MAX_KEYS} keys, got room for {keys}")
    return keys


def _checked_split(size: int | None) -> int:
    if size is None:
        return 0
    size = whole_number("fixed_split_size", size, SPLIT_UNIT)
    if size % SPLIT_UNIT:
        raise WorkloadError(f"fixed_split_size is a multiple of {SPLIT_UNIT}, got {size}")
    return size


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    check_scale(scale)
    return float(scale)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether its start and every stride in use are multiples of 16 bytes."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0 and has_aligned_rows(tensor)
