"""`DecodeCase`: inputs of a step of decoding with their right answer, to verify and to time kernels on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flashgen.core.features.positions import clamp_window
from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.launch.decode_numbers import DecodeShape, strides_of
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.decode_inputs import DecodeForm, DecodeTensors, make_decode_inputs
from flashgen.measure.timing import Run
from flashgen.measure.verification_case import other_bits
from flashgen.measure.verify import Errors, Oracle, check, oracle_of

DecodeLaunch = Callable[[DecodeTensors], object]
"""Launches both kernels of a config on the tensors of a call."""

DecodeFactory = Callable[[DecodeShape], DecodeLaunch]
"""Makes the launch of calls of a shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """Sets of tensors, the right answer of the first one, and the shape of the call."""

    tensors: tuple[DecodeTensors, ...]
    expected: Oracle
    shape: DecodeShape

    @property
    def copies(self) -> int:
        """Sets of caches to rotate."""
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(each.nbytes for each in self.tensors) + self.expected.nbytes

    def run(self, factory: DecodeFactory, repeats: int = 0, *, out_alone: bool = False) -> Errors | Failure:
        """Poison the outputs, run the kernels, and judge; then ask for the same bits so many times more.

        `out_alone`: no LSE is judged.
        """
        first = self.tensors[0]
        run = factory(self.shape)

        def launch() -> None:
            first.out.fill_(math.nan)
            first.lse.fill_(math.nan)
            run(first)

        launch()
        verdict = check(first.out.transpose(1, 2), None if out_alone else first.lse, self.expected)
        if isinstance(verdict, Failure):
            return verdict
        return other_bits(launch, {"out": first.out, "lse": first.lse}, repeats) or verdict

    def timed(self, factory: DecodeFactory) -> Run:
        """A launch that is ready for every copy, without an LSE, as engines call it."""
        run, tensors = factory(self.shape._replace(has_lse=False)), self.tensors
        return lambda n: run(tensors[n])


def decode_problem(
    workload: Workload, copies: int, seed: int, device: torch.device | str, data: str = NORMAL
) -> DecodeCase:
    """A workload's caches with the right answer of the first set; decoding has no data that is hard.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    return decode_case(workload, copies=copies, seed=seed, device=device, form=DecodeForm())


def decode_case(
    workload: Workload,
    *,
    copies: int,
    seed: int,
    device: torch.device | str,
    form: DecodeForm,
) -> DecodeCase:
    """A case of any form.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    tensors = make_decode_inputs(workload, copies=copies, seed=seed, device=device, form=form)
    return DecodeCase(
        tensors=tensors,
        expected=_right(workload, tensors[0]),
        shape=shape_of(workload, tensors[0]),
    )


def _right(w: Workload, one: DecodeTensors) -> Oracle:
    """The answer over all slots, of which those behind a length are hidden by where the queries stand."""
    k, v = (_in_order(cache, one, w) for cache in (one.k, one.v))
    offsets = one.lens - w.seqlen_q
    features, causal = one.features, w.causal or w.seqlen_q == 1
    slots = torch.arange(k.shape[2], device=k.device)
    seen = slots < one.lens[:, None]
    if one.leftpad is not None:
        seen &= slots >= one.leftpad[:, None]
    if one.leftpad is not None or not causal:
        features = replace(features, mask=seen[:, None, None, :])
    return oracle_of(one.q.transpose(1, 2), k, v, causal=causal, q_offset=offsets, features=features)


def _in_order(cache: torch.Tensor, one: DecodeTensors, w: Workload) -> torch.Tensor:
    """(batch, nheads_k, slots, columns), whatever lies where; a stale entry stands for any page."""
    if one.table is None:
        return cache.transpose(1, 2)
    pages = cache[one.table.clamp(0, cache.shape[0] - 1).long()]
    return pages.flatten(1, 2)[:, : w.seqlen_k].transpose(1, 2)


def shape_of(w: Workload, one: DecodeTensors) -> DecodeShape:
    """The shape of a call with these tensors that asks for the LSE."""
    slots = w.seqlen_k if one.table is None else one.table.shape[1] * one.k.shape[1]
    left, right = clamp_window((w.window_left, 0 if w.causal else w.window_right), w.seqlen_q, slots)
    slopes = one.features.alibi_slopes
    return DecodeShape(
        batch=w.batch,
        nheads=w.nheads,
        nheads_k=w.nheads_k,
        seqlen_q=w.seqlen_q,
        seqlen_k=slots,
        head_dim_v=w.head_dim_v,
        q_strides=strides_of(one.q),
        k_strides=strides_of(one.k),
        v_strides=strides_of(one.v),
        o_strides=strides_of(one.out),
        table_stride=0 if one.table is None else one.table.stride(0),
        num_pages=0 if one.table is None else one.k.shape[0],
        window_left=left,
        window_right=right,
        softmax_scale=w.head_dim**-0.5,
        softcap=one.features.softcap,
        alibi_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        has_leftpad=one.leftpad is not None,
        has_lse=True,
    )
