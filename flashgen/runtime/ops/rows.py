"""Packed sequences as they come, (rows, heads, columns), by plans of the memo: without the views of one batch element.

The slow path sees one batch element, as all that is below does. What it leaves launches on memory alone, so a later
call brings its tensors as they are: the four views of a forward pass and the eight of a backward pass cost as much as
two launches. Keys have the places of those of `flashgen.runtime.ops.forward` and `flashgen.runtime.ops.backward`, and
shapes of three dimensions, which no other key has. Outputs and gradients are allocated like rows in place of like a
batch element, which torch lays out alike, as a test holds for all strides.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime.ops import backward, forward, serve
from flashgen.runtime.ops.generated import features_from_function
from flashgen.runtime.ops.keys import (
    BACKWARD,
    BSHD,
    CAUSAL,
    DETERMINISTIC,
    DOUT_SHIFT,
    FLOAT32,
    TF32,
    allows_tf32,
    layout_of,
)
from flashgen.runtime.ops.runs import FeatureRun

Tensor = torch.Tensor

TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
NUMBERS = ("window", "softcap", "max_seqlens", "batch_invariant")
"""The fields of `Features` that calls have here, all others being absent; none has a gradient."""

features_of_rows = features_from_function((*TENSORS, *NUMBERS))
"""The features of such a call from these fields."""

remembered = serve.MEMO.get


def forward_key(q: Tensor, k: Tensor, v: Tensor, causal: bool, features: Features, asked: int) -> tuple[Any, ...]:
    """The key of a forward pass; `asked` has flags of it."""
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | asked | BSHD
    if causal:
        flags |= CAUSAL
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    return (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        *_sequences_key(features),
    )


def prepared_rows(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, features: Features) -> FeatureRun:
    """The slow path of a key, for tensors of three dimensions.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.runtime.ops.serve.prepare`.
    """
    one = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    run: FeatureRun = forward.prepared(key, *one, key[0], features)
    return run


def rows_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool,
    features: Features,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, all tensors being of three dimensions, and the LSE of two."""
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15 | BACKWARD | BSHD
    flags |= (dout.data_ptr() & 15) << DOUT_SHIFT
    if causal:
        flags |= CAUSAL
    if deterministic or backward.is_deterministic():
        flags |= DETERMINISTIC
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    key = (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        dout.shape,
        dout.stride(),
        dtype,
        k.dtype,
        v.dtype,
        dout.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        *_sequences_key(features),
    )
    run = remembered(key)
    if run is None:
        one = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        one_out, one_dout, one_lse = out.unsqueeze(0), dout.unsqueeze(0), lse.unsqueeze(0)
        one_dlse = None if dlse is None else dlse.unsqueeze(0)
        run = backward.prepared(key, one, one_out, one_dout, (one_lse, one_dlse), flags, features)
    dq, dk, dv, *_ = run(dout, dlse, q, k, v, out, lse, softmax_scale, None, features)
    return dq, dk, dv


def _sequences_key(features: Features) -> tuple[Any, ...]:
    """What says where sequences lie, and the numbers that choose code."""
    ends, keys = features.cu_seqlens_q, features.cu_seqlens_k
    used_q, used_k = features.seqused_q, features.seqused_k
    assert ends is not None
    return (
        ends.shape,
        ends.stride(),
        ends.dtype,
        ends.get_device(),
        None if keys is ends else layout_of(keys),
        None if used_q is None else layout_of(used_q),
        None if used_k is None else layout_of(used_k),
        features.max_seqlens,
        features.window,
        features.softcap > 0,
        features.batch_invariant,
    )
