"""What the memo holds: one function for each kind of backend, which allocates an output and computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashgen.core.features.pages import is_paged
from flashgen.core.features.sequences import is_packed
from flashgen.launch.allocation import Layout, elsewhere, empty_beside, layout_of, layout_of_view
from flashgen.runtime.ops.outputs import aligned_copy, dense_like, empty_lse, empty_output, without_padding

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
    run = _run_of_tensors(launch, problem)
    return of_copies(run, problem) if problem.copies else run


def _run_of_tensors(launch: Launch, problem: CheckedCall) -> Run | FeatureRun:
    """The same for tensors of the geometry."""
    call, geometry = problem.call, problem.geometry
    if not is_packed(call.features):
        out = layout_of_view(*geometry.tensor("o"), call.q.dtype, bshd=call.bshd)
        return kernel_run(launch, call.q, out, lse_shape=geometry.q_shape[:3] if call.with_lse else None)
    if is_paged(call.features) or not call.bshd:
        return feature_run(launch, bshd=call.bshd, with_lse=call.with_lse)
    same_head_dim = geometry.q_shape[3] == problem.workload.head_dim_v
    lse_shape = geometry.q_shape[1:3] if call.with_lse else None
    return packed_run(launch, call.q, same_head_dim=same_head_dim, lse_shape=lse_shape)


def of_copies(run: Callable[..., Any], problem: CheckedCall) -> Callable[..., Any]:
    """The same `Run` or `FeatureRun` for aligned copies of q, k and v."""

    def copying(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        return run(aligned_copy(q), aligned_copy(k), aligned_copy(v), *others)

    if not problem.pads:
        return copying
    bshd, default_scale = problem.call.bshd, problem.call.q.shape[-1] ** -0.5

    def padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *others: Any) -> Any:
        found = copying(q, k, v, default_scale if scale is None else scale, *others)
        out = empty_output(q, v, bshd=bshd)
        if isinstance(found, tuple):
            return without_padding(found[0], out), *found[1:]
        return without_padding(found, out)

    return padding


def kernel_run(
    launch: Launch, beside: torch.Tensor, layout: Layout, *, lse_shape: tuple[int, ...] | None
) -> Callable[..., Any]:
    """Allocate an output, and an LSE where it has a shape, and launch a generated kernel.

    What it returns is a `Run` and a `FeatureRun`.

    Args:
        launch: of the kernel.
        beside: a tensor of its GPU.
        layout: of the output.
        lse_shape: batch, nheads and seqlen_q.
    """
    return run_maker(beside)(launch, layout, lse_shape)


def run_maker(
    beside: torch.Tensor,
) -> Callable[[Launch, Layout, tuple[int, ...] | None], Callable[..., Any]]:
    """`kernel_run` beside a tensor, for many launches: what a GPU decides is asked once."""
    empty, is_elsewhere, index = empty_beside(beside), elsewhere(beside), beside.get_device()

    def made(launch: Launch, layout: Layout, lse_shape: tuple[int, ...] | None) -> Callable[..., Any]:
        if lse_shape is None:

            def run(
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                scale: float | None,
                offset: Offset,
                features: Features | None = None,
            ) -> torch.Tensor:
                if is_elsewhere is not None and is_elsewhere():
                    with torch.cuda.device(index):
                        return run(q, k, v, scale, offset, features)
                out = empty(*layout)
                launch(q, k, v, out, None, scale, offset, features)
                return out

            return run
        _, heads, rows = lse_shape
        lse_layout = lse_shape, (heads * rows, rows, 1), torch.float32

        def run_with_lse(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            scale: float | None,
            offset: Offset,
            features: Features | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if is_elsewhere is not None and is_elsewhere():
                with torch.cuda.device(index):
                    return run_with_lse(q, k, v, scale, offset, features)
            out, lse = empty(*layout), empty(*lse_layout)
            launch(q, k, v, out, lse, scale, offset, features)
            return out, lse

        return run_with_lse

    return made


def feature_run(launch: Launch, *, bshd: bool, with_lse: bool) -> FeatureRun:
    """The same of packed sequences whose tensors may have three or four dimensions."""

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


def packed_run(
    launch: Launch, beside: torch.Tensor, *, same_head_dim: bool, lse_shape: tuple[int, ...] | None
) -> FeatureRun:
    """The same of packed sequences in bshd order, as (rows, heads, columns) or as one batch element of them.

    Args:
        launch: of the kernel.
        beside: a tensor of its GPU.
        same_head_dim: whether rows of the output are as long as those of q.
        lse_shape: nheads and rows, where an LSE is asked for.
    """
    empty, is_elsewhere, index = empty_beside(beside), elsewhere(beside), beside.get_device()
    layouts: dict[int, tuple[Layout, Layout]] = {}

    def layouts_of(q: torch.Tensor, v: torch.Tensor) -> tuple[Layout, Layout]:
        """Those of output and LSE for tensors of as many dimensions."""
        out = dense_like(q) if same_head_dim else q.new_empty((*q.shape[:-1], v.shape[-1]))
        heads, rows = lse_shape or (0, 0)
        shape, strides = ((heads, rows), (rows, 1)) if q.dim() == 3 else ((1, heads, rows), (heads * rows, rows, 1))
        found = layouts[q.dim()] = layout_of(out), (shape, strides, torch.float32)
        return found

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, offset: Offset, features: Features
    ) -> Any:
        if is_elsewhere is not None and is_elsewhere():
            with torch.cuda.device(index):
                return run(q, k, v, scale, offset, features)
        layout, lse_layout = layouts.get(q.dim()) or layouts_of(q, v)
        out = empty(*layout)
        if lse_shape is None:
            launch(q, k, v, out, None, scale, offset, features)
            return out
        lse = empty(*lse_layout)
        launch(q, k, v, out, lse, scale, offset, features)
        return out, lse

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
