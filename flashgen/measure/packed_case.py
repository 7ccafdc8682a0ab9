"""Problems of packed sequences: each is compared with the references as a call of its own, all are judged together.

Rows that do not count, and those that see no key, have output 0, LSE -inf and gradients of 0, exactly. Nobody reads
their `neg_delta`: the gradient of such an LSE may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.core.features.sequences import VARLEN
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.measure.backward_reference import ExactGradients, Gradients, exact_gradients, rounded_gradients
from flashgen.measure.backward_verification_case import BackwardVerificationCase
from flashgen.measure.backward_verify import BackwardOracle, judged_gradients, noise_of
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.packed_inputs import PackedForm, make_packed_backward_inputs, make_packed_inputs
from flashgen.measure.packed_pages import in_pages
from flashgen.measure.reference import Answer, exact, rounded
from flashgen.measure.score_rule import ScoreRule, refuse_uncomputed
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import Oracle, judged

NOT_PACKED: dict[str, Any] = {value.name: value.default for value in VARLEN.values}

NO_OFFSET = 0
"""What a launch is given: the offsets of packed sequences follow from their lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence of a call: where its rows are, and what happens to its scores."""

    rows: slice
    keys: slice
    rule: ScoreRule


def packed_problem(
    workload: Workload, copies: int, seed: int, device: torch.device | str, data: str = NORMAL
) -> VerificationCase:
    """A workload's inputs, of its profile of lengths, with the right answer of the first copy.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    return packed_case(workload, PackedForm.of(workload, data), copies=copies, seed=seed, device=device)


def packed_case(
    workload: Workload, form: PackedForm, *, copies: int, seed: int, device: torch.device | str
) -> VerificationCase:
    """A case of any form; raises as `packed_problem` does."""
    _refuse_uncomputed(workload)
    inputs = make_packed_inputs(workload, form, copies=copies, seed=seed, device=device)
    q, k, v, features = inputs.q[0], inputs.k[0], inputs.v[0], inputs.features[0]
    expected = _oracle(workload, form, (q, k, v), features)
    if workload.page_size:
        inputs = in_pages(workload, form, inputs, seed)
    return VerificationCase(inputs=inputs, expected=expected, softmax_scale=workload.head_dim**-0.5, q_offset=NO_OFFSET)


def packed_backward_problem(
    workload: Workload, copies: int, seed: int, device: torch.device | str, data: str = NORMAL
) -> BackwardVerificationCase:
    """The same of a backward pass; what the other copies are given of a forward pass is that of the first one.

    Raises:
        UnsupportedError: the workload has a feature that inputs cannot be made for.
    """
    return packed_backward_case(workload, PackedForm.of(workload, data), copies=copies, seed=seed, device=device)


def packed_backward_case(
    workload: Workload,
    form: PackedForm,
    *,
    copies: int,
    seed: int,
    device: torch.device | str,
    with_dlse: bool = False,
) -> BackwardVerificationCase:
    """A case of any form; raises as `packed_backward_problem` does."""
    _refuse_uncomputed(workload)
    inputs = make_packed_backward_inputs(workload, form, copies=copies, seed=seed, device=device, with_dlse=with_dlse)
    first, *others = inputs.tensors
    expected = _backward_oracle(workload, form, first, inputs.features[0])
    for each in others:
        each.out.copy_(first.out)
        each.lse.copy_(first.lse)
    return BackwardVerificationCase(
        inputs=inputs, expected=expected, softmax_scale=workload.head_dim**-0.5, q_offset=NO_OFFSET
    )


def _refuse_uncomputed(workload: Workload) -> None:
    """Each sequence is a call of its own, which the references have to compute; pages only say where keys lie."""
    alone = replace(workload, varlen=False, lengths="", total_q=None, total_k=None, page_size=None)
    refuse_uncomputed(alone.specialization)


def sequences_of(
    workload: Workload, form: PackedForm, q: torch.Tensor, k: torch.Tensor, features: Features
) -> Iterator[Sequence]:
    """The sequences that have queries; scores of each follow the rule of a call of its own."""
    slopes = features.alibi_slopes
    for b, rows, keys in form.sequences():
        if rows.start == rows.stop:
            continue
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        alone = replace(features, alibi_slopes=own, **NOT_PACKED)
        rule = ScoreRule.of(
            q[:, :, rows],
            k[:, :, keys],
            causal=workload.causal,
            q_offset=None,
            softmax_scale=workload.head_dim**-0.5,
            features=alone,
        )
        yield Sequence(rows=rows, keys=keys, rule=rule)


def _oracle(workload: Workload, form: PackedForm, inputs: tuple[torch.Tensor, ...], features: Features) -> Oracle:
    q, k, v = inputs
    tf32 = workload.dtype == "tf32"
    right, usual = _blank(q, v, torch.float64), _blank(q, v, q.dtype)
    for each in sequences_of(workload, form, q, k, features):
        one = q[:, :, each.rows], k[:, :, each.keys], v[:, :, each.keys]
        _put(right, each.rows, exact(*one, each.rule))
        _put(usual, each.rows, rounded(*one, each.rule, tf32=tf32))
    return judged(right, usual, q.dtype, tf32=tf32)


def _blank(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Answer:
    shape = q.shape[:3]
    return Answer(
        out=torch.zeros((*shape, v.shape[3]), dtype=dtype, device=q.device),
        lse=torch.full(shape, float("-inf"), dtype=dtype, device=q.device),
        score_size=torch.zeros(shape, dtype=dtype, device=q.device),
    )


def _put(whole: Answer, rows: slice, part: Answer) -> None:
    whole.out[:, :, rows], whole.lse[:, :, rows] = part.out, part.lse
    whole.score_size[:, :, rows] = part.score_size


def _backward_oracle(workload: Workload, form: PackedForm, t: BackwardTensors, features: Features) -> BackwardOracle:
    tf32 = workload.dtype == "tf32"
    unit, usual_score, least = noise_of(t.q.dtype, tf32=tf32)
    right, usual = _blank_gradients(t), _zeros(t, t.q.dtype)
    for each in sequences_of(workload, form, t.q, t.k, features):
        rows, keys = each.rows, each.keys
        one = t.q[:, :, rows], t.k[:, :, keys], t.v[:, :, keys], t.dout[:, :, rows]
        dlse = None if t.dlse is None else t.dlse[:, :, rows]
        if keys.start == keys.stop:  # nothing flows to anything
            _put(right.forward, rows, exact(*one[:3], each.rule))
            right.neg_delta[:, :, rows] = 0.0 if dlse is None else dlse.double()
            continue
        found = exact_gradients(*one, each.rule, dlse=dlse, least=least, usual_score=usual_score)
        _put(right.forward, rows, found.forward)
        right.neg_delta[:, :, rows] = found.neg_delta
        for whole, part in ((right.gradients, found.gradients), (right.noise, found.noise)):
            _put_gradients(whole, part, rows, keys)
        _put_gradients(usual, rounded_gradients(*one, each.rule, dlse=dlse, tf32=tf32), rows, keys)
    without_keys = right.forward.lse == float("-inf")  # rows that no sequence uses are among them
    return judged_gradients(t, right, usual, unit, tf32=tf32, unread=without_keys)


def _blank_gradients(t: BackwardTensors) -> ExactGradients:
    zeros = _zeros(t, torch.float64)
    return ExactGradients(
        forward=_blank(t.q, t.v, torch.float64),
        neg_delta=torch.zeros(t.q.shape[:3], dtype=torch.float64, device=t.q.device),
        gradients=zeros,
        noise={name: torch.zeros_like(gradient[..., 0]) for name, gradient in zeros.items()},
    )


def _zeros(t: BackwardTensors, dtype: torch.dtype) -> Gradients:
    shapes = {"dq": t.q.shape, "dk": t.k.shape, "dv": t.v.shape}
    return {name: torch.zeros(shape, dtype=dtype, device=t.q.device) for name, shape in shapes.items()}


def _put_gradients(whole: Gradients, part: Gradients, rows: slice, keys: slice) -> None:
    for name, each in whole.items():
        each[:, :, rows if name == "dq" else keys] = part[name]
