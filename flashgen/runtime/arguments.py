"""The arguments of `flashgen.attention`: their types, their rules as far as no shapes are needed, and autocast."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.checks import MAX_INTEGER, is_name_in, real_number, whole_number
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features import table
from flashgen.core.features.functions import FUNCTIONS, QUERY_LISTS
from flashgen.core.features.values import BlockMask, Features, Window
from flashgen.core.quoting import shown
from flashgen.runtime.argument_types import refuse_names
from flashgen.runtime.ops.calls import check_offset
from flashgen.runtime.ops.generated import features_function, requires_grad_function
from flashgen.runtime.ops.keys import is_tracked
from flashgen.runtime.ops.mods import UserCallable, handle_for, loaded_aux, resolve
from flashgen.runtime.ops.schemas import GRADIENT_FIELDS, differentiable_of

LAYOUTS = ("bhsd", "bshd")
SCALES_END = 2.0**127
"""What a scale of scores is below: kernels multiply with it times log2(e) in float32."""


class CallArguments(TypedDict, total=False):
    """The keyword arguments of `flashgen.attention` but `return_lse`, for type checkers; a test compares them."""

    layout: str
    causal: bool
    q_offset: int | torch.Tensor | None
    window: Window
    softmax_scale: float | None
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    score_mod: UserCallable | None
    mask_mod: UserCallable | None
    aux: tuple[torch.Tensor, ...]
    block_mask: BlockMask | None
    dropout_p: float
    rng_state: torch.Tensor | None
    deterministic: bool


FEATURE_ARGUMENTS = tuple(
    argument.name for feature in table.FEATURES if feature.values for argument in feature.arguments
)
"""The arguments of the public call that `features_of` takes."""

_WITHOUT_GRADIENT = {
    value.name: feature.no_gradient
    for feature in table.FEATURES
    if feature.trains and feature.no_gradient
    for value in feature.values
    if value.is_tensor
}
_needs_what_there_is_not = requires_grad_function(_WITHOUT_GRADIENT)
_needs_gradient = requires_grad_function(GRADIENT_FIELDS)


def check_layout(layout: str) -> None:
    """Refuse an unknown layout.

    Raises:
        WorkloadError: it is neither.
    """
    if not is_name_in(layout, LAYOUTS):
        raise WorkloadError(f'layout is "bhsd" or "bshd", got {shown(layout)}')


def check_scale(softmax_scale: float | None) -> None:
    """Refuse a scale of the scores that is none.

    Raises:
        WorkloadError: it is not above 0, or not finite, be it in float32 alone.
    """
    if softmax_scale is None or (type(softmax_scale) is float and 0.0 < softmax_scale < SCALES_END):
        return
    scale = real_number("softmax_scale", softmax_scale)
    if not 0 < scale < math.inf:
        raise WorkloadError(f"softmax_scale is finite and above 0, got {scale}")
    if scale >= SCALES_END:
        raise WorkloadError(f"softmax_scale is below 2 ** 127, as kernels have it in float32, got {scale}")


def _with_functions(
    score_mod: UserCallable | None,
    mask_mod: UserCallable | None,
    aux: tuple[torch.Tensor, ...],
    block_mask: BlockMask | None,
    **others: Any,
) -> Features:
    if score_mod is None and mask_mod is None:
        raise WorkloadError("aux tensors and a block mask belong to a score_mod or a mask_mod, got neither")
    aux = tuple(aux)
    handle = handle_for(score_mod, mask_mod, tuple(tensor.dtype for tensor in aux), block_mask is not None)
    return Features(**others, mods=handle, aux=aux, block_mask=block_mask)


features_of = features_function(_with_functions)
"""The features of a call from those of its arguments that `FEATURE_ARGUMENTS` names, all of them by name.

It raises `WorkloadError` where one breaks a rule that needs no shapes of q and k. `is_traced` says that torch.compile
looks on.
"""


def drawn_state(dropout_p: float, rng_state: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The seed and the offset of a call's dropout: what it was given, or two numbers of torch's generator.

    They are drawn on the device of q, so a captured CUDA graph draws others whenever it is replayed, and torch.compile,
    checkpoints and transforms see an ordinary random operation. A call without dropout has none. Of DTensors all ranks
    have those of the first one, by a broadcast.
    """
    if not dropout_p:
        return None
    if rng_state is not None:
        return rng_state
    drawn = torch.randint(MAX_INTEGER, (2,), device=q.device)
    mesh = None if type(q) is torch.Tensor else getattr(q, "device_mesh", None)
    if mesh is None:
        return drawn
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(drawn, mesh, [Replicate()] * mesh.ndim)


def bound(call: Callable[..., Any], named: Mapping[str, Any], function: str) -> dict[str, Any]:
    """Keyword arguments of `call` with its defaults, for a function that takes the same ones.

    Raises:
        TypeError: `call` has no argument of such a name.
    """
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    refuse_names(function, (name for name in named if name not in known))
    return {**known, **named}


def requires_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features, *, is_hidden: bool
) -> bool:
    """Whether a call with these features, under autograd, is one that trains.

    `is_hidden` says that transforms may hide which tensors require a gradient.

    Raises:
        UnsupportedError: it is, and what requires a gradient, or stands between, has no derivative.
    """
    if is_hidden or _needs_what_there_is_not(features):
        _refuse_what_has_no_gradient(features, is_hidden=is_hidden)
    trains = (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or _needs_gradient(features)
        or any(tensor.requires_grad for tensor in features.aux)
        or (is_hidden and is_tracked((q, k, v, *differentiable_of(features))))
    )
    if features.mods:
        _check_functions(features, trains=trains, is_hidden=is_hidden)
    return trains


def with_bias_of_each_key(features: Features, k: torch.Tensor, *, bshd: bool) -> Features:
    """Those of a call that trains: a bias that a score_mod follows is expanded where it has one value for all keys.

    The sum of dS over a row, which is such a value's gradient, follows from the LSE alone for scores that enter the
    softmax. Of those before a score_mod each has a derivative of its own, which kernels write; autograd sums them.
    """
    bias = features.bias
    if bias is None or not bias.dim() or bias.shape[-1] != 1 or k.dim() != 4:
        return features
    return replace(features, bias=bias.expand(*bias.shape[:-1], k.shape[1 if bshd else 2]))


def _check_functions(features: Features, *, trains: bool, is_hidden: bool) -> None:
    score_mod = resolve(features.mods).score_mod
    for number, tensor in enumerate(features.aux):
        is_learned = tensor.requires_grad and score_mod is not None
        if is_learned and not is_dynamo_compiling():  # which leaves a call with learned tensors to Python, if it may
            is_learned = number in loaded_aux(score_mod)
        if not is_learned and (tensor.requires_grad or (is_hidden and is_tracked((tensor,)))):
            raise UnsupportedError(f"{FUNCTIONS.no_gradient}, got aux[{number}] of shape {tuple(tensor.shape)}")
    if trains and features.block_mask is not None and not features.block_mask.trains:
        raise WorkloadError(
            "a block mask that trains also lists the query blocks of each key block, as those of flashgen.block_mask "
            f"do ({', '.join(QUERY_LISTS)}), got one without"
        )


def _refuse_what_has_no_gradient(features: Features, *, is_hidden: bool) -> None:
    for name, reason in _WITHOUT_GRADIENT.items():
        tensor = getattr(features, name)
        if tensor is not None and (tensor.requires_grad or (is_hidden and is_tracked((tensor,)))):
            raise UnsupportedError(reason)


def in_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, k and v in the dtype of `torch.autocast` where that is on for their device, as torch does it for SDPA.

    A bias may stay as it is. So may sinks but for those in another half precision than q is in then.
    """
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v, sinks
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    if sinks is not None and sinks.dtype in (torch.float16, torch.bfloat16) and sinks.dtype != dtype:
        sinks = sinks.float()
    return q, k, v, sinks


def split_offset(
    q: torch.Tensor, q_offset: int | torch.Tensor | None, *, is_shifted: bool
) -> tuple[int | None, torch.Tensor | None]:
    """A query offset as an int or a tensor, the other one None.

    Raises:
        WorkloadError: nothing is shifted by it, or the tensor is not int32 (batch,) on the device of q.
    """
    if q_offset is None:
        return None, None
    if not is_shifted:
        given = "a tensor" if isinstance(q_offset, torch.Tensor) else shown(q_offset)
        raise WorkloadError(
            f"q_offset shifts a causal mask, a window or ALiBi and needs one of them, got {given} alone"
        )
    if type(q_offset) is int and -MAX_INTEGER <= q_offset <= MAX_INTEGER:
        return q_offset, None
    if not isinstance(q_offset, torch.Tensor):
        return whole_number("q_offset, where it is no tensor,", q_offset, -MAX_INTEGER, MAX_INTEGER), None
    check_offset(q, q_offset)
    return None, q_offset.contiguous()
