"""Random packed sequences: the rows of all of them in one batch element, with NaN in rows that no sequence has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure.backward_inputs import BackwardInputs, make_backward_inputs
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.feature_inputs import FeatureForm, alibi_slopes
from flashgen.measure.inputs import Inputs, make_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """What of a call its workload leaves open.

    Attributes:
        queries: of each sequence.
        keys: likewise.
        used_q: how many of the queries of each sequence count; empty is all.
        used_k: the same of the keys.
        spare: rows behind the last sequence.
        layout: "bshd" is rows before heads in memory, as models have them; "bhsd" is heads first.
        padding: NaN rows behind the end of each tensor.
        gain: factor on q.
        features: the form of softcap, slopes and sinks.
        data: a name of `measure.data_kinds.DATA_KINDS`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    used_q: tuple[int, ...] = ()
    used_k: tuple[int, ...] = ()
    spare: int = 0
    layout: str = "bshd"
    padding: int = 0
    gain: float = 1.0
    features: FeatureForm = field(default_factory=FeatureForm)
    data: str = NORMAL

    @classmethod
    def of(cls, workload: Workload, data: str = NORMAL) -> PackedForm:
        """The lengths of the workload's profile; a rounding may leave a row to no sequence.

        Of keys in pages they are told as engines tell them, by `seqused_k`, and there are no other rows.
        """
        queries, keys = workload.each_seqlen_q, workload.each_length
        rows = [(workload.total_q or 0) - sum(queries)]
        if workload.page_size is None:
            rows.append((workload.total_k or 0) - sum(keys))
        used_k = keys if workload.page_size else ()
        return cls(queries=queries, keys=keys, used_k=used_k, spare=max(rows), data=data)

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """The number of each sequence, and its rows that count, of queries and of keys."""
        first_q, first_k = ([0, *itertools.accumulate(lengths)] for lengths in (self.queries, self.keys))
        used_q, used_k = self.used_q or self.queries, self.used_k or self.keys
        for b, (rows, keys) in enumerate(zip(used_q, used_k, strict=True)):
            yield b, slice(first_q[b], first_q[b] + rows), slice(first_k[b], first_k[b] + keys)


def make_packed_inputs(
    workload: Workload, form: PackedForm, *, copies: int, seed: int, device: torch.device | str
) -> Inputs:
    """Inputs of a forward pass, as `make_inputs` has them for one batch element with the rows of all sequences.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    found = make_inputs(
        _one_batch_element(workload, form),
        copies=copies,
        seed=seed,
        device=device,
        **_dense_form(form),
    )
    hide_unused(form, (*found.q, *found.k, *found.v), found.q)
    features = packed_features_of(workload, form, found.features[0], device)
    return replace(found, features=(features,) * copies)


def make_packed_backward_inputs(
    workload: Workload,
    form: PackedForm,
    *,
    copies: int,
    seed: int,
    device: torch.device | str,
    with_dlse: bool = False,
) -> BackwardInputs:
    """The same of a backward pass, as `make_backward_inputs` has them.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    found = make_backward_inputs(
        _one_batch_element(workload, form),
        copies=copies,
        seed=seed,
        device=device,
        **_dense_form(form),
        with_dlse=with_dlse,
    )
    queries = tuple(each.q for each in found.tensors)
    hide_unused(form, (*queries, *[t for each in found.tensors for t in (each.k, each.v)]), queries)
    features = packed_features_of(workload, form, found.features[0], device)
    return replace(found, features=(features,) * copies)


def hide_unused(form: PackedForm, tensors: tuple[torch.Tensor, ...], queries: tuple[torch.Tensor, ...]) -> None:
    """Write NaN over rows that do not count, in (1, heads, rows, width)."""
    for tensor in tensors:
        is_query = any(tensor is each for each in queries)
        counts = torch.zeros(tensor.shape[2], dtype=torch.bool, device=tensor.device)
        for _, rows, keys in form.sequences():
            counts[rows if is_query else keys] = True
        tensor.masked_fill_(~counts[:, None], float("nan"))


def packed_features_of(workload: Workload, form: PackedForm, scores: Features, device: torch.device | str) -> Features:
    """The features of scores with where the sequences lie, and the workload's window, however long they are."""

    def integers(values: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slopes = scores.alibi_slopes
    if slopes is not None and form.features.alibi_batch:
        factors = 0.5 + torch.arange(len(form.queries), device=device)[:, None] / max(len(form.queries), 1)
        slopes = alibi_slopes(workload.nheads, device) * factors
    return replace(
        scores,
        window=(workload.window_left, workload.window_right),
        alibi_slopes=slopes,
        cu_seqlens_q=integers((0, *itertools.accumulate(form.queries))),
        cu_seqlens_k=integers((0, *itertools.accumulate(form.keys))),
        seqused_q=integers(form.used_q) if form.used_q else None,
        seqused_k=integers(form.used_k) if form.used_k else None,
        max_seqlens=(workload.seqlen_q, workload.seqlen_k),
    )


def _dense_form(form: PackedForm) -> dict[str, Any]:
    """What the inputs of one batch element are told of the form."""
    return {
        "layout": form.layout,
        "padding": form.padding,
        "gain": form.gain,
        "form": form.features,
        "data": form.data,
    }


def _one_batch_element(workload: Workload, form: PackedForm) -> Workload:
    """Without its window, of which one of all rows together knows no width."""
    return replace(
        workload,
        direction="forward",
        varlen=False,
        lengths="",
        total_q=None,
        total_k=None,
        page_size=None,
        batch=1,
        seqlen_q=sum(form.queries) + form.spare,
        seqlen_k=sum(form.keys) + form.spare,
        window_left=None,
        window_right=None,
    )
