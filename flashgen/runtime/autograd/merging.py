"""The gradient of merged states, in plain torch: each state gets its share of the gradient of the result."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.runtime.ops.merging import States, check, merge_op, stacked

Tensor = torch.Tensor


def merge_with_gradient(outs: States, lses: States, layout: str, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """`merge_states` for a call whose gradients will be asked for."""
    check(outs, lses, layout, dtype)
    merged: tuple[Tensor, Tensor] = _MergeStates.apply(  # type: ignore[no-untyped-call]
        stacked(outs), stacked(lses), layout, dtype
    )
    return merged


class _MergeStates(torch.autograd.Function):
    """With p = exp(lses - lse): d outs = p * dout, and d lses = p * (dout . (outs - out) + dlse)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outs: Tensor, lses: Tensor, layout: str, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        merged: tuple[Tensor, Tensor] = merge_op(outs, lses, layout, dtype)
        return merged

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        outs, lses, layout, _ = inputs
        ctx.save_for_backward(outs, lses, *output)
        ctx.swaps_heads = layout != "bhsd"

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        outs, lses, out, lse = ctx.saved_tensors

        def to_rows(of_lse: Tensor) -> Tensor:
            return (of_lse.transpose(-1, -2) if ctx.swaps_heads else of_lse)[..., None]

        # of a row that no state has a key for, -inf - -inf is NaN, and so would second derivatives be through a choice
        share = (lses - torch.where(lse.isinf(), 0.0, lse)).masked_fill(lses.isinf(), -torch.inf).exp()
        # what a state without keys holds may be anything
        seen = torch.where(to_rows(lses).isinf(), 0.0, outs.float())
        weights, gradient = to_rows(share), dout.float()
        of_outs = (weights * gradient).to(outs.dtype)
        of_lses = (gradient * (seen - out.float())).sum(-1)
        of_lses = share * ((of_lses.transpose(-1, -2) if ctx.swaps_heads else of_lses) + dlse)
        return of_outs, of_lses, None, None
