"""Random feature arguments of a workload: slopes, sinks, bias and mask, as models have them or in odder forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.table import asked, given
from flashgen.core.features.values import Features
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.launch.dtypes import TORCH_DTYPES
from flashgen.measure.key_masks import VISIBLE_SHARE, make_key_mask

SOFTCAP = 50.0
"""Gemma-2's."""

SOFTCAP_BEND = 4.0
"""With a softcap, one of so many caps is the standard deviation of the scores: tanh bends, and is not flat yet."""

HIDDEN_KEYS = 32
"""A full mask leaves three scores of four, and one key of so many is hidden from every query."""

BLIND_ROWS = 11
"""In the form `blind`, one row of so many sees no key."""


Axes = tuple[bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureForm:
    """Which of the legal forms of its features a problem takes; the defaults are what models have.

    Attributes:
        softcap: the cap.
        alibi_batch: slopes are (batch, nheads) instead of (nheads,).
        bias_axes: whether a bias has a value of its own for each (batch element, head); None is one for each head if
            it has one for each query, and one for each batch element if not.
        mask_axes: likewise for a mask; None is one for each batch element.
        scattered: "" is contiguous along the keys and aligned, "odd" has an odd pointer and row stride, "transposed"
            is contiguous along the queries.
        blind: the mask hides every key from some rows.
        visible_keys: where the visible keys of a mask of keys are, one of `measure.key_masks.FORMS`.
        bias_dtype: empty is that of q.
        sink_dtype: empty is fp32.
    """

    softcap: float = SOFTCAP
    alibi_batch: bool = False
    bias_axes: Axes | None = None
    mask_axes: Axes | None = None
    scattered: str = ""
    blind: bool = False
    visible_keys: str = "end"
    bias_dtype: str = ""
    sink_dtype: str = ""


def make_features(
    workload: Workload, form: FeatureForm, *, copies: int, generator: torch.Generator, padding: int
) -> tuple[Features, ...]:
    """Feature arguments for each copy of the inputs; what a workload does not have is absent.

    With `padding`, a bias or a mask is a part of a larger tensor, in every dimension: behind a bias is NaN, behind
    a mask True. Slopes and sinks are the same for all copies.

    Raises:
        UnsupportedError: the workload asks for a feature that nothing is made for here.
    """
    w, device = workload, generator.device
    slopes, sinks = None, None
    if w.alibi:
        slopes = alibi_slopes(w.nheads, device)
        if form.alibi_batch:
            slopes = slopes * (0.5 + torch.rand((w.batch, 1), generator=generator, device=device))
    if w.sink:
        sinks = torch.randn(w.nheads, generator=generator, device=device)
        sinks = sinks.to(TORCH_DTYPES[form.sink_dtype or "fp32"])
    found = tuple(
        Features(
            window=(w.window_left, w.window_right),
            softcap=form.softcap if w.softcap else 0.0,
            alibi_slopes=slopes,
            sinks=sinks,
            bias=_bias(w, form, generator, padding) if w.bias else None,
            mask=_mask(w, form, generator, padding) if w.mask else None,
        )
        for _ in range(copies)
    )
    made = {feature.name for feature in given(found[0])}
    missing = [feature.name for feature in asked(w) if feature.values and feature.name not in made]
    if missing:
        raise UnsupportedError(f"random inputs have {sorted(made)}, and {w.key} also asks for {missing}")
    return found


def alibi_slopes(nheads: int, device: torch.device | str) -> torch.Tensor:
    """2^(-8 i / nheads) for i from 1 on (Press et al. 2022, arXiv 2108.12409), fp32 (nheads,)."""
    return torch.exp2(-8.0 / nheads * torch.arange(1, nheads + 1, device=device, dtype=torch.float32))


def feature_bytes(workload: Workload) -> int:
    """Bytes of one bias and one mask of the default form."""
    w = workload
    bias = {"": 0, "full": w.nheads * w.seqlen_q * w.seqlen_k, "keys": w.batch * w.seqlen_k}[w.bias]
    mask = {"": 0, "full": w.batch * w.seqlen_q * w.seqlen_k, "keys": w.batch * w.seqlen_k}[w.mask]
    return bias * DTYPE_BYTES[w.dtype] + mask


def _bias(w: Workload, form: FeatureForm, generator: torch.Generator, padding: int) -> torch.Tensor:
    axes = form.bias_axes or ((False, True) if w.bias == "full" else (True, False))
    dtype = TORCH_DTYPES[form.bias_dtype or w.dtype]
    bias = _slice(w, w.bias, axes, form, dtype, float("nan"), generator.device, padding)
    return bias.normal_(generator=generator)


def _mask(w: Workload, form: FeatureForm, generator: torch.Generator, padding: int) -> torch.Tensor:
    mask = _slice(w, w.mask, form.mask_axes or (True, False), form, torch.bool, True, generator.device, padding)
    if w.mask == "full":
        mask.bernoulli_(VISIBLE_SHARE, generator=generator)
        unseen = torch.randperm(w.seqlen_k, generator=generator, device=generator.device)
        mask[..., unseen[: w.seqlen_k // HIDDEN_KEYS]] = False
        if form.blind:
            mask[:, :, BLIND_ROWS // 2 :: BLIND_ROWS] = False
        return mask
    batch, heads = mask.shape[:2]
    mask.copy_(make_key_mask(form.visible_keys, (batch, heads), w.seqlen_k, generator))
    if form.blind and batch > 1:
        mask[-1] = False
    return mask


def _slice(
    w: Workload,
    kind: str,
    axes: Axes,
    form: FeatureForm,
    dtype: torch.dtype,
    behind: float | bool,
    device: torch.device,
    padding: int,
) -> torch.Tensor:
    """A tensor of the shape that `kind` and `axes` say, which is a part of a larger one full of `behind`."""
    shape = (w.batch if axes[0] else 1, w.nheads if axes[1] else 1, w.seqlen_q if kind == "full" else 1, w.seqlen_k)
    if not padding and not form.scattered:
        return torch.empty(shape, dtype=dtype, device=device)
    batch, heads, rows, keys = (size + extra for size, extra in zip(shape, (1, 1, padding, padding), strict=True))
    keys = -(-keys // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    first = 0
    if form.scattered == "odd":
        keys, first = keys + 1, 1
    if form.scattered == "transposed":
        whole = torch.full((batch, heads, keys, rows), behind, dtype=dtype, device=device).transpose(2, 3)
    else:
        whole = torch.full((batch, heads, rows, keys), behind, dtype=dtype, device=device)
    return whole[: shape[0], : shape[1], : shape[2], first : first + shape[3]]
