"""What the ops return for tensors without memory: shapes and strides, where the call that they stand for is valid.

torch.compile and torch.export ask these, and torch itself does where one tensor of a call is on the meta device. So
the rules of shapes, dtypes and devices hold here, too: else a graph could be made that fails when it runs, or a call
be answered with memory that nothing was written to. Rules of strides and pointers wait for real tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.features import table
from flashgen.core.features.declaration import CallFacts
from flashgen.core.features.pages import is_paged
from flashgen.core.features.sequences import is_packed
from flashgen.core.features.values import Features
from flashgen.runtime.ops import mods as user_mods
from flashgen.runtime.ops.backward_calls import check_outputs
from flashgen.runtime.ops.calls import check_inputs, check_lse, check_offset, in_bhsd, sizes_of
from flashgen.runtime.ops.outputs import dense_like, empty_lse, empty_output
from flashgen.runtime.ops.schemas import DIFFERENTIATED

Tensor = torch.Tensor
Restore = Callable[..., tuple[Any, ...]]
"""Makes the features of flat arguments, and what is beside them."""


def forward_fake(restored: Restore, *, with_lse: bool) -> Callable[..., Any]:
    """The fake of an op of forward passes whose features travel in these flat arguments."""

    def fake(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        softmax_scale: float | None = None,
        bshd: bool = False,
        q_offset: int | None = None,
        q_offset_tensor: Tensor | None = None,
        *flat: Any,
        **named: Any,
    ) -> Any:
        features, *_ = restored(*flat, **named)
        check(q, k, v, bshd=bshd, offset=q_offset_tensor, features=features)
        out = empty_output(q, v, bshd=bshd)
        return (out, empty_lse(q, bshd=bshd)) if with_lse else out

    return fake


def backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    *flat: Any,
    **named: Any,
) -> tuple[Tensor, ...]:
    """The fake of the op of backward passes, which returns an empty tensor for what is not asked for."""
    features, _, *needs = DIFFERENTIATED.restored(*flat, **named)
    check(q, k, v, bshd=bshd, offset=q_offset_tensor, features=features)
    check_outputs(out, dout, q, v)
    check_lse("lse", lse, q, bshd=bshd)
    if dlse is not None:
        check_lse("dlse", dlse, q, bshd=bshd)
    asked = (
        getattr(features, one.field) if needed else None for one, needed in zip(table.gradients(), needs, strict=True)
    )
    return (
        *(dense_like(tensor) for tensor in (q, k, v)),
        *(lse.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in asked),
    )


def check(q: Tensor, k: Tensor, v: Tensor, *, bshd: bool, offset: Tensor | None, features: Features | None) -> None:
    """Check the shapes, dtypes and devices of a call.

    Raises:
        WorkloadError: they break a rule, as they would in the call itself.
    """
    views = in_bhsd(q, k, v) if bshd else (q, k, v)
    check_inputs(*views, packed=is_packed(features), paged=is_paged(features))
    if offset is not None:
        check_offset(q, offset)
    if features is not None and table.given(features):
        mods = user_mods.resolve(features.mods) if features.mods else None
        page_size = views[1].shape[2] if is_paged(features) else None
        sizes = sizes_of(views[0], views[1], features)
        table.checked(features, CallFacts(q=q, sizes=sizes, mods=mods, page_size=page_size))
