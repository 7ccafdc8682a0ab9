"""Torch's backward operators as baselines: their arguments, results, and what they cannot be asked for."""

from __future__ import annotations

import pytest
import torch

from flashgen.core.workload import Workload
from flashgen.measure import backward_baselines
from flashgen.measure.backward_baselines import BACKENDS, Backend, prepared, unsupported
from flashgen.measure.backward_verification_case import BackwardVerificationCase, backward_problem

ON_CPU = Backend(
    forward="_scaled_dot_product_flash_attention_for_cpu",
    backward="_scaled_dot_product_flash_attention_for_cpu_backward",
    saved=("out", "logsumexp"),
)
"""The one pair of such operators that runs without a GPU."""


def problem(key: str) -> tuple[Workload, BackwardVerificationCase]:
    workload = Workload.parse(f"bwd-bf16-{key}")
    return workload, backward_problem(workload, 2, 3, torch.device("cpu"))


def test_a_backend_computes_the_same_gradients_for_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa-flash", ON_CPU)
    workload, made = problem("b1-h2-s48-d32-causal")
    found = prepared("sdpa-flash", workload, made)
    assert not isinstance(found, str), found
    with found.context():
        assert not torch.is_grad_enabled()
        first, second = found.run(0), found.run(1)
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    right = made.expected.gradients["dv"].values
    torch.testing.assert_close(first[2].double(), right, rtol=0.1, atol=0.05)
    assert float((second[2].double() - right).norm() / right.norm()) > 0.5


def test_another_function_is_no_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa-flash", ON_CPU)
    workload, _ = problem("b1-h2-s48-d32-causal")
    _, other = problem("b1-h2-s48-d32")
    found = prepared("sdpa-flash", workload, other)
    assert isinstance(found, str)
    assert "something else (relative error of dq" in found


def test_what_torch_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, made = problem("b1-h2-s16-d16")
    monkeypatch.setitem(BACKENDS, "sdpa-flash", Backend(forward="no_such_operator", backward="", saved=()))
    assert "no_such_operator" in str(prepared("sdpa-flash", workload, made))
    needs_more = Backend(forward=ON_CPU.forward, backward="_flash_attention_backward", saved=("out",))
    monkeypatch.setitem(BACKENDS, "sdpa-flash", needs_more)
    assert "an argument logsumexp, which is not known" in str(prepared("sdpa-flash", workload, made))


@pytest.mark.parametrize("impl", BACKENDS)
def test_every_argument_of_torchs_operators_is_known(impl: str) -> None:
    """On the torch at hand; another one may need more, and then its backend is no baseline there."""
    backend = BACKENDS[impl]
    known = ["query", "key", "value", "attn_bias", "dropout_p", "is_causal", "compute_log_sumexp", "scale"]
    known += ["grad_out", "grad_out_", "grad_input_mask"]
    forward = getattr(torch.ops.aten, backend.forward).default
    returned = [returned.name for returned in forward._schema.returns[: len(backend.saved)]]
    assert returned[:2] in (["output", "logsumexp"], ["output", "log_sumexp"])
    values = dict.fromkeys([*known, *backend.saved])
    for name in (backend.forward, backend.backward):
        op = getattr(torch.ops.aten, name).default
        positional, named = backward_baselines._arguments(op, values)
        assert len(positional) + len(named) == len(op._schema.arguments)


@pytest.mark.parametrize(
    ("key", "able"),
    [
        ("b1-h8-s64-d64-causal", {"sdpa-flash", "sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h8-hk2-s64-d64", {"sdpa-flash", "sdpa-cudnn"}),
        ("b1-h8-sq64-sk128-d64-causal", {"sdpa-flash"}),
        ("b1-h8-s64-d64-bias", {"sdpa-efficient"}),
        ("b1-h8-s64-d64-mask", {"sdpa-cudnn", "sdpa-efficient"}),
        ("b1-h8-s64-d64-bias-causal", set()),
        ("b1-h8-s64-d64-softcap", set()),
    ],
)
def test_who_may_be_asked(key: str, able: set[str]) -> None:
    workload = Workload.parse(f"bwd-bf16-{key}")
    assert {impl for impl in BACKENDS if unsupported(impl, workload) is None} == able


def test_a_bias_is_expanded_and_its_rows_begin_at_whole_steps() -> None:
    _, made = problem("b2-h2-sq8-sk19-d16-bias")
    tensors, features = made.inputs.tensors[0], made.inputs.features[0]
    assert features.bias is not None
    bias = backward_baselines._bias(tensors, features)
    assert bias is not None
    assert torch.equal(bias, features.bias.expand(2, 2, 8, 19))
    assert bias.stride(2) % backward_baselines.BIAS_STEP == 0
    _, masked = problem("b2-h2-sq8-sk19-d16-keymask")
    mask = masked.inputs.features[0].mask
    made_bias = backward_baselines._bias(masked.inputs.tensors[0], masked.inputs.features[0])
    assert mask is not None
    assert made_bias is not None
    assert torch.equal(torch.isinf(made_bias), ~mask.expand(2, 2, 8, 19))


def test_a_deterministic_workload_asks_torch_for_the_same_bits() -> None:
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with backward_baselines._mode(deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before  # type: ignore[attr-defined]
