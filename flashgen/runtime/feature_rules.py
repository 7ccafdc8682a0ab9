"""The rules of a call's feature arguments, and the form in which the slow path needs them.

Checked once for every set of shapes, dtypes and strides that the memo has not seen; a repeated call pays nothing.
"""

from __future__ import annotations

import dataclasses

import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features
from flashgen.core.score_mods import ScoreMods

FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
AXES = "(batch, nheads, seqlen_q, seqlen_k)"

Sizes = tuple[int, int, int, int]
"""batch, nheads, seqlen_q and seqlen_k of a call."""


def check_window(window: object) -> None:
    """Refuse what is no window.

    Raises:
        WorkloadError: it is not two edges, each None or an int of at least 0.
    """
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise WorkloadError(f"window is (left, right), got {window!r}")
    for edge in window:
        if edge is None or (isinstance(edge, int) and not isinstance(edge, bool) and edge >= 0):
            continue
        hint = "; None is unlimited, where flash-attn writes -1" if edge == -1 else ""
        raise WorkloadError(f"an edge of a window is None or an int of at least 0, got {tuple(window)!r}{hint}")


def checked(features: Features, q: torch.Tensor, sizes: Sizes, mods: ScoreMods | None) -> Features:
    """The features of a call, with bias and mask in four dimensions.

    Args:
        features: as they came, bias and mask in up to four dimensions.
        q: the queries, for dtype and device.
        sizes: of the call.
        mods: the user's functions, which aux tensors and block mask belong to.

    Raises:
        WorkloadError: an argument breaks a rule; the message names the rule and the value.
    """
    batch, nheads, _, _ = sizes
    _check_slopes(features.alibi_slopes, q, batch, nheads)
    _check_sinks(features.sinks, q, nheads)
    bias = _four_dimensions("bias", features.bias, q, sizes)
    if bias is not None and bias.dtype not in FLOATS:
        raise WorkloadError(f"bias is float32, float16 or bfloat16, got {bias.dtype}")
    mask = _four_dimensions("mask", features.mask, q, sizes)
    if mask is not None and mask.dtype != torch.bool:
        raise WorkloadError(f"mask is bool, True where attended, got {mask.dtype}; a mask of numbers to add is a bias")
    if mods is not None:
        _check_mods(features, q, sizes, mods)
    return dataclasses.replace(features, bias=bias, mask=mask)


def _check_slopes(slopes: torch.Tensor | None, q: torch.Tensor, batch: int, nheads: int) -> None:
    if slopes is None:
        return
    if slopes.dtype != torch.float32 or slopes.device != q.device or slopes.shape not in ((nheads,), (batch, nheads)):
        raise WorkloadError(
            f"alibi_slopes are float32 (nheads,) or (batch, nheads) on the device of q, got {slopes.dtype} "
            f"{tuple(slopes.shape)} on {slopes.device} for batch {batch} and {nheads} heads on {q.device}"
        )


def _check_sinks(sinks: torch.Tensor | None, q: torch.Tensor, nheads: int) -> None:
    if sinks is None:
        return
    if sinks.dtype not in (torch.float32, q.dtype) or sinks.device != q.device or sinks.shape != (nheads,):
        raise WorkloadError(
            f"sinks are (nheads,) in float32 or the dtype of q on its device, got {sinks.dtype} {tuple(sinks.shape)} "
            f"on {sinks.device} for {nheads} heads in {q.dtype} on {q.device}"
        )


def _four_dimensions(name: str, tensor: torch.Tensor | None, q: torch.Tensor, sizes: Sizes) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.device != q.device:
        raise WorkloadError(f"{name} is on the device of q, got {tensor.device} and {q.device}")
    missing = 4 - tensor.dim()
    padded = (1,) * missing + tuple(tensor.shape)
    if missing < 0 or any(size not in (1, full) for size, full in zip(padded, sizes, strict=True)):
        raise WorkloadError(f"{name} broadcasts to {AXES} in any layout of q, got {tuple(tensor.shape)} for {sizes}")
    return tensor[(None,) * missing] if missing else tensor


def _check_mods(features: Features, q: torch.Tensor, sizes: Sizes, mods: ScoreMods) -> None:
    from flashgen.runtime.block_mask import check_aux, check_block_mask

    check_aux(features.aux, q.device)
    if features.block_mask is not None:
        batch, nheads, seqlen_q, seqlen_k = sizes
        check_block_mask(
            features.block_mask,
            mods,
            batch=batch,
            nheads=nheads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            device=q.device,
        )
