"""The arguments of `flashgen.attention`: their rules, as far as the shapes of q and k are not needed, and autocast."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import BlockMask
from flashgen.runtime.feature_rules import check_window
from flashgen.runtime.keys import is_tracked
from flashgen.runtime.mods import UserCallable, handle_for
from flashgen.runtime.op_arguments import split_block_mask
from flashgen.runtime.ops import FEATURES_WITHOUT_MODS

LAYOUTS = ("bhsd", "bshd")

NO_GRADIENT_OF_SLOPES = (
    "alibi_slopes have no gradient here, and these require one; detach them, or add the slopes as a bias"
)
NO_GRADIENT_OF_FUNCTIONS = (
    "no gradient flows through functions of the caller (score_mod, mask_mod and their aux tensors), and an input "
    "requires one; call it under torch.no_grad() or detach the inputs"
)

Window = tuple[int | None, int | None]


def check_layout(layout: str) -> None:
    """Refuse an unknown layout.

    Raises:
        WorkloadError: it is neither.
    """
    if layout not in LAYOUTS:
        raise WorkloadError(f'layout is "bhsd" or "bshd", got {layout!r}')


def feature_arguments(
    window: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    score_mod: UserCallable | None,
    mask_mod: UserCallable | None,
    aux: tuple[torch.Tensor, ...],
    block_mask: BlockMask | None,
) -> tuple[Any, ...]:
    """The feature arguments of an op, as far as they can be checked without the shapes of q and k.

    Raises:
        WorkloadError: one breaks a rule.
    """
    check_window(window)
    if not 0 <= softcap < math.inf:
        raise WorkloadError(f"softcap is finite and at least 0 (off), got {softcap}")
    plain = (*window, softcap, alibi_slopes, sinks, bias, mask)
    if score_mod is None and mask_mod is None:
        if aux or block_mask is not None:
            raise WorkloadError("aux tensors and a block mask belong to a score_mod or a mask_mod, got neither")
        return plain
    handle = handle_for(score_mod, mask_mod, tuple(tensor.dtype for tensor in aux), block_mask is not None)
    if block_mask is None:
        return (*plain, handle, aux)
    return (*plain, handle, aux, *split_block_mask(block_mask))


def requires_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    flat_features: tuple[Any, ...],
    aux: tuple[torch.Tensor, ...],
    *,
    is_hidden: bool,
) -> bool:
    """Whether a call with these flat_features, under autograd, is one that trains.

    `is_hidden` says that transforms may hide which tensors require a gradient.

    Raises:
        UnsupportedError: it is, and what requires a gradient, or stands between, has no derivative.
    """
    slopes, sinks, bias = flat_features[3], flat_features[4], flat_features[5]
    if slopes is not None and (slopes.requires_grad or (is_hidden and is_tracked((slopes,)))):
        raise UnsupportedError(NO_GRADIENT_OF_SLOPES)
    trains = (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (len(aux) > 0 and any(tensor.requires_grad for tensor in aux))
        or (is_hidden and is_tracked((q, k, v, sinks, bias, *aux)))
    )
    if trains and len(flat_features) > FEATURES_WITHOUT_MODS:
        raise UnsupportedError(NO_GRADIENT_OF_FUNCTIONS)
    return trains


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
    return q, k, v, sinks if sinks is None or sinks.dtype == dtype else sinks.float()


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
        given = "a tensor" if isinstance(q_offset, torch.Tensor) else repr(q_offset)
        raise WorkloadError(
            f"q_offset shifts a causal mask, a window or ALiBi and needs one of them, got {given} alone"
        )
    if not isinstance(q_offset, torch.Tensor):
        return int(q_offset), None
    if q_offset.dtype != torch.int32 or q_offset.shape != q.shape[:1] or q_offset.device != q.device:
        raise WorkloadError(
            f"a q_offset tensor is int32 (batch,) on the device of q, got {q_offset.dtype} {tuple(q_offset.shape)} "
            f"on {q_offset.device} for batch {q.shape[0]} on {q.device}"
        )
    return None, q_offset.contiguous()
