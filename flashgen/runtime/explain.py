"""The public call `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.config import Config
from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import BlockMask
from flashgen.core.workload import DIRECTIONS
from flashgen.runtime import serve
from flashgen.runtime.arguments import Window, check_layout, feature_arguments, split_offset
from flashgen.runtime.backward_calls import BackwardCall
from flashgen.runtime.backward_serve import placed
from flashgen.runtime.calls import Call
from flashgen.runtime.keys import FLOAT32, allows_tf32
from flashgen.runtime.mods import UserCallable, resolve
from flashgen.runtime.op_arguments import features_of, without_tensors
from flashgen.runtime.ops import FEATURES_WITHOUT_MODS

if TYPE_CHECKING:
    from flashgen.runtime.backward_calls import CheckedBackwardCall
    from flashgen.runtime.calls import CheckedCall
    from flashgen.runtime.explanation import Explanation


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    score_mod: UserCallable | None = None,
    mask_mod: UserCallable | None = None,
    aux: tuple[torch.Tensor, ...] = (),
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    direction: str = "forward",
    deterministic: bool = False,
    config: Config | None = None,
) -> Explanation:
    """Why `attention` with these arguments is served the way it is: the rung, the record, every family's reason.

    Args:
        q: this and what is not named here is as in `attention`.
        k: likewise.
        v: likewise.
        layout: likewise.
        causal: likewise.
        q_offset: likewise.
        window: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        sinks: likewise.
        bias: likewise; in a backward pass, whether it requires a gradient makes a difference.
        mask: likewise.
        score_mod: likewise.
        mask_mod: likewise.
        aux: likewise.
        block_mask: likewise.
        return_lse: likewise; the forward pass of training always has an LSE.
        direction: "forward", or "backward" for the backward pass of the call, where the gradient of the output is taken
            to be laid out like the output.
        deterministic: of a backward pass; so is `torch.use_deterministic_algorithms(True)`.
        config: a config to serve with, in the place of the look-up.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: the tensors are not on a GPU, or no kernel family does this here.
    """
    from flashgen.runtime import explanation

    check_layout(layout)
    if direction not in DIRECTIONS.values():
        raise WorkloadError(f"direction is forward or backward, got {direction!r}")
    features = feature_arguments(
        window, softcap, alibi_slopes, sinks, bias, mask, score_mod, mask_mod, tuple(aux), block_mask
    )
    is_shifted = causal or window != (None, None) or alibi_slopes is not None
    offset, offset_tensor = split_offset(q, q_offset, is_shifted=is_shifted)
    is_forward = direction == "forward"
    call = _call_of(
        features,
        q=q,
        k=k,
        v=v,
        causal=causal,
        bshd=layout == "bshd",
        explicit_offset=offset is not None,
        offset_tensor=offset_tensor is not None,
        with_lse=return_lse or not is_forward,
        config=config,
    )
    problem: CheckedCall | CheckedBackwardCall
    if is_forward:
        problem, device, _ = serve.placed(call)
    else:
        fixed = deterministic or torch.are_deterministic_algorithms_enabled()
        has_gradient = bias is not None and bias.requires_grad
        problem, device, _ = placed(BackwardCall(forward=call, deterministic=fixed, bias_grad=has_gradient))
    return explanation.explain(
        problem.workload,
        problem.spec,
        device,
        serve.records(),
        config=config,
        generated_only=call.generated_only,
    )


def _call_of(flat_features: tuple[Any, ...], *, q: torch.Tensor, **arguments: Any) -> Call:
    """The call that the ops make of these arguments."""
    plain, others = flat_features[:FEATURES_WITHOUT_MODS], flat_features[FEATURES_WITHOUT_MODS:]
    mods, rest = (others[0], others[1:]) if others else (0, ())
    features = features_of(*plain, *rest)
    is_plain = features is without_tensors(None, None, 0.0) and not mods
    return Call(
        q=q,
        tf32=q.dtype is FLOAT32 and allows_tf32(),
        features=None if is_plain else features,
        mods=resolve(mods) if mods else None,
        **arguments,
    )
