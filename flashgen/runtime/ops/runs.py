"""What the memo holds: one function for each kind of backend, which allocates an output and computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashgen.core.features.pages import is_paged
from flashgen.core.features.sequences import is_packed
from flashgen.runtime.ops.outputs import empty_lse, empty_output

if TYPE_CHECKING:
    from flashgen.core.features.values import Features
    from flashgen.launch.plan import Launch
    from flashgen.runtime.ops.calls import CheckedCall

Offset = int | torch.Tensor | None
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None, Offset], Any]
"""Serves every call of one key of the memo: (q, k, v, softmax_scale, q_offset) to the output, or to output and LSE."""

FeatureRun = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None, Offset, "Features"], Any]
"""The same for a key with features, whose arguments come last."""


def forward_run(launch: Launch, problem: CheckedCall) -> Run | FeatureRun:
    """What serves the calls of a key by a generated kernel."""
    call = problem.call
    same_head_dim = call.q.shape[-1] == call.v.shape[-1]
    if is_packed(call.features) and not is_paged(call.features) and call.bshd:
        shape = problem.geometry.q_shape[1:3] if call.with_lse else None
        return packed_run(launch, same_head_dim=same_head_dim, lse_shape=shape)
    if call.features is not None:
        return feature_run(launch, bshd=call.bshd, with_lse=call.with_lse)
    if call.with_lse:
        lse_shape = problem.geometry.q_shape[:3]
        return kernel_lse_run(launch, bshd=call.bshd, same_head_dim=same_head_dim, lse_shape=lse_shape)
    return kernel_run(launch, bshd=call.bshd, same_head_dim=same_head_dim)


def kernel_run(launch: Launch, *, bshd: bool, same_head_dim: bool) -> Run:
    """Allocate an output and launch a generated kernel."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, offset: Offset) -> torch.Tensor:
        out = empty_like(q) if same_head_dim else empty_output(q, v, bshd=bshd)
        launch(q, k, v, out, None, scale, offset)
        return out

    empty_like = torch.empty_like
    return run


def kernel_lse_run(launch: Launch, *, bshd: bool, same_head_dim: bool, lse_shape: tuple[int, ...]) -> Run:
    """Allocate an output and an LSE of this shape, and launch a generated kernel."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, offset: Offset
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = empty_like(q) if same_head_dim else empty_output(q, v, bshd=bshd)
        lse = q.new_empty(lse_shape, dtype=fp32)
        launch(q, k, v, out, lse, scale, offset)
        return out, lse

    empty_like, fp32 = torch.empty_like, torch.float32
    return run


def feature_run(launch: Launch, *, bshd: bool, with_lse: bool) -> FeatureRun:
    """Allocate an output, and an LSE if it is asked for, and launch a generated kernel with its features."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, offset: Offset, features: Features
    ) -> Any:
        out = empty_output(q, v, bshd=bshd)
        if not with_lse:
            launch(q, k, v, out, None, scale, offset, features)
            return out
        lse = empty_lse(q, bshd=bshd)
        launch(q, k, v, out, lse, scale, offset, features)
        return out, lse

    return run


def packed_run(launch: Launch, *, same_head_dim: bool, lse_shape: tuple[int, ...] | None) -> FeatureRun:
    """The same of packed sequences in bshd order, as (rows, heads, columns) or as one batch element of them.

    Args:
        launch: of the kernel.
        same_head_dim: whether rows of the output are as long as those of q.
        lse_shape: nheads and rows, where an LSE is asked for.
    """

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, offset: Offset, features: Features
    ) -> Any:
        out = empty_like(q) if same_head_dim else q.new_empty((*q.shape[:-1], v.shape[-1]))
        if lse_shape is None:
            launch(q, k, v, out, None, scale, offset, features)
            return out
        lse = q.new_empty(lse_shape if q.dim() == 3 else (1, *lse_shape), dtype=fp32)
        launch(q, k, v, out, lse, scale, offset, features)
        return out, lse

    empty_like, fp32 = torch.empty_like, torch.float32
    return run


def sdpa_run(impl: str, *, causal: bool, bshd: bool, gqa: bool) -> Any:
    """Call one SDPA backend, which computes the same function where no offset and no LSE is asked for.

    What it returns is a `Run`, and a `FeatureRun` for calls with a bias or a mask.
    """
    from flashgen.launch.sdpa import BACKENDS

    backend = BACKENDS[impl]

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        offset: Offset,
        features: Features | None = None,
    ) -> torch.Tensor:
        expected = empty_output(q, v, bshd=bshd).stride()
        if bshd:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=_attn_mask(features), is_causal=causal, scale=scale, enable_gqa=gqa
            )
        out = out.transpose(1, 2) if bshd else out
        # torch.compile was promised these strides
        return out if out.stride() == expected else out.new_empty_strided(out.shape, expected).copy_(out)

    return run


def _attn_mask(features: Features | None) -> torch.Tensor | None:
    """Bias or mask, whichever is there, in the four dimensions that every backend takes."""
    given = None if features is None else features.bias if features.bias is not None else features.mask
    return None if given is None else given[(None,) * (4 - given.dim())]
