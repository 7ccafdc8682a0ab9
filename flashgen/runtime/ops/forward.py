"""The torch.library ops of forward passes.

Workload, memo and look-up live inside the ops, because torch.compile cannot trace them; `flashgen.runtime.ops.fakes`
says what it asks. Calls without an LSE have ops of their own, so that none is allocated, and so have calls without
features, whose key is short. Arguments that equal their default cost nothing in the dispatcher, so the front passes
only the others. A user's score functions come as a number that `flashgen.runtime.ops.mods` knows. None of these ops has
a gradient, which would cost 6 us a call even where nobody asks for one: `flashgen.runtime.autograd.ops` has those.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime.ops import mods as user_mods
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.backward_calls import BackwardCall
from flashgen.runtime.ops.batching import map_one_by_one
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.fakes import forward_fake
from flashgen.runtime.ops.keys import (
    BSHD,
    CAUSAL,
    DETERMINISTIC,
    EXPLICIT_OFFSET,
    FLOAT32,
    OFFSET_TENSOR,
    TF32,
    TRAINS,
    WITH_LSE,
    WITHOUT_TRAINING,
    allows_tf32,
    asked_gradients,
    feature_key,
)
from flashgen.runtime.ops.open_packed import packed_open_key
from flashgen.runtime.ops.recent import NOTHING, RECENT, remember
from flashgen.runtime.ops.runs import Run
from flashgen.runtime.ops.schemas import INPUTS, OPTIONS, SERVED

Tensor = torch.Tensor

_PLAIN = f"{INPUTS}, {OPTIONS}"
LIBRARY = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention({_PLAIN}) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_lse({_PLAIN}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_features({_PLAIN}, {SERVED.schema}) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_features_lse({_PLAIN}, {SERVED.schema}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]

_remembered = serve.MEMO.get
_recent = RECENT.get
_SHARED = slice(7, 13)
"""The parts of a key that sizes leave as they are."""


def attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    asked: int = 0,
) -> Any:
    """What the op of a call without features does; `asked` has flags of its key."""
    # the key is written out here: every call of a function costs as much as two of its parts
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | asked
    if causal:
        flags |= CAUSAL
    if bshd:
        flags |= BSHD
    offset: int | Tensor | None = None
    if q_offset is not None:
        offset = q_offset
        flags |= EXPLICIT_OFFSET
    elif q_offset_tensor is not None:
        offset = q_offset_tensor
        flags |= OFFSET_TENSOR
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    run: Run | None
    for fits, run in _recent(flags, NOTHING):
        if fits(q, k, v):
            return run(q, k, v, softmax_scale, offset)
    key = (
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
    )
    run = _remembered(key)
    if run is None:
        run = prepared(key, q, k, v, flags)
    else:
        remember(key, (q, k, v), run)
    return run(q, k, v, softmax_scale, offset)


def attention_features_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: Tensor | None,
    features: Features,
    asked: int = 0,
) -> Any:
    """The same of a call with features."""
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | asked
    if causal:
        flags |= CAUSAL
    if bshd:
        flags |= BSHD
    offset: int | Tensor | None = None
    if q_offset is not None:
        offset = q_offset
        flags |= EXPLICIT_OFFSET
    elif q_offset_tensor is not None:
        offset = q_offset_tensor
        flags |= OFFSET_TENSOR
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
        dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        *feature_key(features),
    )
    run = _remembered(key)
    if run is None:
        run = prepared(key, q, k, v, flags, features)
    return run(q, k, v, softmax_scale, offset, features)


def prepared(
    key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, flags: int, features: Features | None = None
) -> Any:
    """The slow path of a key, whose first parts are those of the keys above, for tensors of four dimensions."""
    alone = (flags & WITHOUT_TRAINING, *key[1:]) if flags & TRAINS else key
    part = () if features is None else packed_open_key(features)
    open_key = None if part is None else serve.open_key(key, alone[0], _SHARED, part)
    if open_key is not None and (alone is key or (flags, open_key) in serve.TRAINABLE):
        run = serve.prepare_open(open_key, key, q, k, v, *([] if features is None else [features]))
        if run is not None:
            return run
    call = Call(
        q=q,
        k=k,
        v=v,
        causal=bool(flags & CAUSAL),
        bshd=bool(flags & BSHD),
        with_lse=bool(flags & WITH_LSE),
        explicit_offset=bool(flags & EXPLICIT_OFFSET),
        offset_tensor=bool(flags & OFFSET_TENSOR),
        tf32=bool(flags & TF32),
        features=features,
        mods=user_mods.resolve(features.mods) if features is not None and features.mods else None,
        open_key=open_key,
    )
    with serve.LOCK:  # what `reload` forgets while this thread compiles would else be remembered behind it
        run = _remembered(alone)
        if run is None:
            run = serve.prepare(call)
            serve.remember(alone, run)
        if alone is not key:
            _check_backward(call, flags)
            serve.remember(key, run)
    return run


def _check_backward(call: Call, flags: int) -> None:
    """Refuse a call whose gradients will be asked for and whose backward pass has no kernel.

    Then the forward pass fails, which the traceback of the user's own line shows, and not `loss.backward()`.
    """
    backward = BackwardCall(forward=call, deterministic=bool(flags & DETERMINISTIC), gradients=asked_gradients(flags))
    spec = serve.check_support(backward)
    if call.open_key is not None and spec.aligned16:
        serve.TRAINABLE.add((flags, call.open_key))


def attention_lse_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
) -> Any:
    """What the op of a call with an LSE and without features does."""
    return attention_kernel(q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor, WITH_LSE)


def _features(asked: int) -> Any:
    """What an op of calls with features does."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        softmax_scale: float | None = None,
        bshd: bool = False,
        q_offset: int | None = None,
        q_offset_tensor: Tensor | None = None,
        *flat: Any,
    ) -> Any:
        (features,) = SERVED.restored(*flat)
        return attention_features_kernel(
            q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor, features, asked
        )

    return attention


def _plain(*flat: Any, **named: Any) -> tuple[None]:
    """A call without features."""
    return (None,)


_IMPLEMENTATIONS = {
    "attention": (attention_kernel, forward_fake(_plain, with_lse=False)),
    "attention_lse": (attention_lse_kernel, forward_fake(_plain, with_lse=True)),
    "attention_features": (_features(0), forward_fake(SERVED.restored, with_lse=False)),
    "attention_features_lse": (_features(WITH_LSE), forward_fake(SERVED.restored, with_lse=True)),
}
for _name, (_kernel, _fake) in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):  # the CPU's raises an error
        LIBRARY.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=LIBRARY)
    map_one_by_one(_name, LIBRARY)

attention_op = torch.ops.flashgen.attention.default
attention_lse_op = torch.ops.flashgen.attention_lse.default
attention_features_op = torch.ops.flashgen.attention_features.default
attention_features_lse_op = torch.ops.flashgen.attention_features_lse.default
