"""Gradients of a bias that a score_mod follows: of one value for all keys of a row, too, which no formula has there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Specialization
from flashgen.launch.backward import BackwardTensors
from flashgen.runtime.arguments import features_of
from flashgen.runtime.autograd.ops import attention_train_op
from flashgen.runtime.ops.schemas import TRAINED
from tests.fakes.gpu import EmulatedGpu, FakeGpu, emulated_by
from tests.runtime.training import SK, SQ, B, H, leaf, qkv

Tensor = torch.Tensor
NOTHING = dict.fromkeys(("alibi_slopes", "sinks", "mask", "mask_mod", "block_mask", "rng_state"))


def bent(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return score * 2.0 + 0.1 * score * score


@dataclass
class ByReference(EmulatedGpu):
    """Plans that compute by `flashgen.reference`, and write what kernels do of the gradient of a bias."""

    def make_plan(self, kernel: Any, spec: Specialization, *others: Any) -> Any:
        FakeGpu.make_plan(self, kernel, spec, *others)

        def launch(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            out, lse, _, _, features = rest
            for target, value in zip((out, lse), _attend(q, k, v, features.bias), strict=True):
                if target is not None:
                    target.copy_(value)

        return launch

    def make_backward_plan(self, kernel: Any, spec: Specialization, *others: Any) -> Any:
        FakeGpu.make_backward_plan(self, kernel, spec, *others)

        def launch(t: BackwardTensors, scale: Any, offset: Any, features: Any, with_neg_delta: bool = True) -> Tensor:
            inputs = [one.detach().requires_grad_() for one in (t.q, t.k, t.v)]
            whole = features.bias.detach().expand(B, H, SQ, SK).clone().requires_grad_()
            with torch.enable_grad():
                out, lse = _attend(*inputs, whole)
                dlse = torch.zeros_like(lse) if t.dlse is None else t.dlse
                *found, scores = torch.autograd.grad((out, lse), (*inputs, whole), (t.dout, dlse))
            for target, value in zip((t.dq, t.dk, t.dv), found, strict=True):
                target.copy_(value)
            if t.dbias is not None:
                t.dbias.copy_(scores.sum(2) if t.dbias.dim() == 3 else scores.sum_to_size(t.dbias.shape))
            return dlse - (t.dout * t.out).sum(-1)

        return launch


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    return flashgen.reference.attention(q, k, v, bias=bias, score_mod=bent, return_lse=True)


@pytest.fixture
def by_reference(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> ByReference:
    return emulated_by(ByReference, emulated, monkeypatch)


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("shape", [(SQ, 1), (1,), (H, 1, 1), (B, H, SQ, 1), (SK,), (SQ, SK)])
def test_its_gradient_is_that_of_the_reference(shape: tuple[int, ...]) -> None:
    inputs, bias = qkv(), leaf(*shape)
    weights = torch.arange(B * H * SQ).view(B, H, SQ, 1) % 7 - 3.0

    def gradient(attention: Any) -> Any:
        out, lse = attention(*inputs, bias=bias, score_mod=bent, return_lse=True)
        return torch.autograd.grad((out * weights).sum() + lse[..., 1:].sum(), bias)[0]

    right = gradient(flashgen.reference.attention)
    assert right.abs().max() > 0.1
    for _ in range(2):  # the second call is remembered
        torch.testing.assert_close(gradient(flashgen.attention), right, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("by_reference")
def test_an_op_that_is_called_with_one_value_a_row_is_refused() -> None:
    """The formula of such a bias would leave out the derivative of the score_mod."""
    bias = leaf(SQ, 1)
    given: dict[str, Any] = {"window": (None, None), "softcap": 0.0, "dropout_p": 0.0, "aux": (), **NOTHING}
    features = features_of(**given, bias=bias, score_mod=bent, is_traced=False)
    inputs = [one.detach() for one in qkv()]
    with pytest.raises(UnsupportedError, match="a bias that a score_mod follows needs a value for each key"):
        attention_train_op(*inputs, False, None, False, None, None, *TRAINED.flat(features, False))
