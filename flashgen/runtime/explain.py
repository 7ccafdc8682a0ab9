"""The public call `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashgen.core.checks import instance, is_name_in
from flashgen.core.config import Config
from flashgen.core.errors import ConfigError, WorkloadError
from flashgen.core.features import table
from flashgen.core.keys import DIRECTIONS
from flashgen.core.quoting import shown
from flashgen.runtime.api import attention
from flashgen.runtime.argument_types import check_types
from flashgen.runtime.arguments import (
    FEATURE_ARGUMENTS,
    CallArguments,
    bound,
    check_layout,
    check_scale,
    features_of,
    split_offset,
)
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.backward_calls import BackwardCall
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.keys import FLOAT32, allows_tf32, aux_gradient
from flashgen.runtime.ops.mods import resolve
from flashgen.runtime.ops.schemas import GRADIENT_FIELDS, differentiable_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashgen.runtime.lookup.explanation import Explanation


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = False,
    direction: str = "forward",
    config: Config | None = None,
    **call: Unpack[CallArguments],
) -> Explanation:
    """Why `attention` with these arguments is served the way it is: the rung, the record, every family's reason.

    Args:
        q: as in `attention`.
        k: likewise.
        v: likewise.
        return_lse: likewise; the forward pass of training always has an LSE.
        direction: "forward", or "backward" for the backward pass of the call, where the gradient of the output is taken
            to be laid out like the output.
        config: a config to serve with, in the place of the look-up.
        call: every other argument of `attention`. In a backward pass, whether a bias requires a gradient makes a
            difference, and so do aux tensors, `deterministic` and `torch.use_deterministic_algorithms(True)`.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: the tensors are not on a GPU, or no kernel family does this here.
        TypeError: `attention` has no such argument.
    """
    from flashgen.runtime.lookup import explanation

    arguments = bound(attention, call, "explain")
    check_types({**arguments, "q": q, "k": k, "v": v, "return_lse": return_lse})
    check_layout(arguments["layout"])
    check_scale(arguments["softmax_scale"])
    if not is_name_in(direction, DIRECTIONS.values()):
        raise WorkloadError(f"direction is forward or backward, got {shown(direction)}")
    if config is not None:
        instance("config", config, Config, ConfigError)
    if arguments["dropout_p"] and arguments["rng_state"] is None:
        arguments["rng_state"] = q.new_empty(2, dtype=torch.int64)  # what is explained draws no bits
    features = features_of(**{name: arguments[name] for name in FEATURE_ARGUMENTS})
    causal, is_forward = arguments["causal"], direction == "forward"
    is_shifted = causal or features.window != (None, None) or features.alibi_slopes is not None
    offset, offset_tensor = split_offset(q, arguments["q_offset"], is_shifted=is_shifted)
    asked: Call | BackwardCall
    asked = forward = Call(
        q=q,
        k=k,
        v=v,
        causal=causal,
        bshd=arguments["layout"] == "bshd",
        explicit_offset=offset is not None,
        offset_tensor=offset_tensor is not None,
        with_lse=return_lse or not is_forward,
        tf32=q.dtype is FLOAT32 and allows_tf32(),
        features=features if table.given(features) else None,
        mods=resolve(features.mods) if features.mods else None,
        config=config,
    )
    if not is_forward:
        given = [*zip(GRADIENT_FIELDS, differentiable_of(features), strict=True)]
        given += [(aux_gradient(number), tensor) for number, tensor in enumerate(features.aux)]
        asked = BackwardCall(
            forward=forward,
            deterministic=arguments["deterministic"] or torch.are_deterministic_algorithms_enabled(),
            gradients=frozenset(name for name, tensor in given if tensor is not None and tensor.requires_grad),
        )
    problem, device, _ = serve.placed(asked)
    return explanation.explain(
        problem.workload,
        problem.spec,
        device,
        serve.records(),
        config=config,
        generated_only=forward.generated_only,
        with_lse=is_forward and forward.with_lse,
        own_offset=forward.explicit_offset,
        copies=problem.copies,
    )
