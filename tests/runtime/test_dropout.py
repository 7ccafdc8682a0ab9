"""Dropout through the public calls on an emulated GPU: whose bits they are, what keeps them, and every rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen
import flashgen.reference
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.dropout import keep_scale, threshold
from flashgen.core.workload import Workload
from flashgen.runtime import arguments
from flashgen.runtime.lookup.ladder import NEAREST_HERE
from flashgen.runtime.warmup import variants
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.ladders import Ladder, config, faster, measured

pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")

STATE = torch.tensor([2**62 + 5, -17])


def qkv(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 10, 16), (2, 2, 13, 16), (2, 2, 13, 24)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def gradients(call: Callable[..., Any], **named: Any) -> list[torch.Tensor]:
    """Output, LSE and the gradients of everything."""
    leaves = [x.detach().requires_grad_() for x in qkv()]
    out, lse = call(*leaves, return_lse=True, **named)
    loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.square().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


FEATURES: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal window": {"causal": True, "window": (5, None)},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 4)},
    "bias": {"bias": torch.linspace(-1, 1, 130).view(10, 13), "deterministic": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_it_is_that_of_the_reference(name: str) -> None:
    named = {**FEATURES[name], "dropout_p": 0.4, "rng_state": STATE}
    found, right = (gradients(call, **named) for call in (flashgen.attention, flashgen.reference.attention))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_without_it_nothing_is_drawn_and_the_plain_ops_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    state = torch.get_rng_state()
    monkeypatch.setattr(arguments, "features_of", None)
    plain = flashgen.attention(q, k, v)
    assert torch.equal(flashgen.attention(q, k, v, dropout_p=0.0, rng_state=STATE), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_bits_come_from_torchs_generator() -> None:
    def call() -> torch.Tensor:
        return flashgen.attention(*(x.detach() for x in qkv()), dropout_p=0.5)

    torch.manual_seed(3)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    with torch.random.fork_rng():
        assert torch.equal(call(), first)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
    given = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(flashgen.attention(*qkv(), dropout_p=0.5, rng_state=given), first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_finds_the_same_bits_again(use_reentrant: bool, emulated: EmulatedGpu) -> None:
    def call(*inputs: torch.Tensor, return_lse: bool) -> Any:
        def run(*given: torch.Tensor) -> Any:
            return flashgen.attention(*given, dropout_p=0.5, return_lse=return_lse)

        return checkpoint(run, *inputs, use_reentrant=use_reentrant)

    def plain(*inputs: torch.Tensor, return_lse: bool) -> Any:
        return flashgen.attention(*inputs, dropout_p=0.5, return_lse=return_lse)

    torch.manual_seed(1)
    right = gradients(plain)
    torch.manual_seed(1)
    if use_reentrant:  # whose autograd asks for backward()
        leaves = qkv()
        out, lse = call(*leaves, return_lse=True)
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.square().sum()
        loss.backward()
        found = [out, lse, *(x.grad for x in leaves)]
    else:
        found = gradients(call)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


def test_torch_compile_trains_with_it_in_one_graph() -> None:
    def model(*inputs: torch.Tensor, return_lse: bool) -> Any:
        return flashgen.attention(*inputs, dropout_p=0.5, return_lse=return_lse)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    right = gradients(model)
    torch.manual_seed(1)
    found, other = gradients(compiled), gradients(compiled)
    for one, expected in zip(found, right, strict=True):
        torch.testing.assert_close(one, expected)
    assert not torch.equal(other[0], found[0])


def test_functions_of_functions() -> None:
    leaves = [x.detach() for x in qkv()]

    def loss(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashgen.attention(q, *leaves[1:], dropout_p=0.3, rng_state=STATE)
        return out.square().sum()

    q = leaves[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(leaves[0]), expected)


def test_it_is_served_by_the_config_of_the_call_without_it(ladder: Ladder, emulated: EmulatedGpu) -> None:
    ladder.user(measured(Workload.parse("b2-h4-hk2-s64-d128"), config=config(1), baselines=faster("sdpa-flash")))
    flashgen.reload()
    q, k, v = (torch.zeros(2, heads, 64, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    flashgen.attention(q, k, v, dropout_p=0.3)
    ((spec, served),) = emulated.compiled  # torch's backend, which was faster, does not drop what this does
    assert spec.key == "fwd-bf16-d128-dropout"
    assert served == config(1)
    explained = flashgen.explain(q, k, v, dropout_p=0.3)
    assert "dropout" in str(explained)
    assert explained.served.rung == NEAREST_HERE  # nothing was measured with dropout
    assert flashgen.explain(q, k, v).served.rung < NEAREST_HERE


def test_its_kernels_are_warmed_up(emulated: EmulatedGpu) -> None:
    flashgen.warmup(["b2-h4-hk2-s64-d128"], training=True, dropout=True)
    keys = {spec.key for spec, _ in emulated.compiled}
    assert keys >= {"fwd-bf16-d128-dropout", "bwd-bf16-d128-dropout", "fwd-bf16-d128"}
    ready = len(emulated.compiled)
    q, k, v = (torch.zeros(2, heads, 64, 128, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    flashgen.attention(q, k, v, dropout_p=0.3).sum().backward()
    assert len(emulated.compiled) == ready
    step = Workload.parse("dec-b2-h4-hk2-sk64-d128")
    assert [spec.dropout for spec in variants(step, offset_tensor=False, dropout=True)] == [False]


def test_what_is_explained_draws_nothing() -> None:
    state = torch.get_rng_state()
    flashgen.explain(*qkv(), dropout_p=0.3)
    flashgen.explain(*qkv(), dropout_p=0.3, direction="backward")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"dropout_p": 1.0}, "dropout_p is at least 0 .off. and below 1, got 1.0"),
        ({"dropout_p": -0.1}, "below 1, got -0.1"),
        ({"dropout_p": float("nan")}, "below 1, got nan"),
        ({"dropout_p": "much"}, "dropout_p must be a number, got 'much'"),
        ({"dropout_p": 0.1, "rng_state": STATE.int()}, "rng_state is int64 .2,., seed and offset"),
        ({"dropout_p": 0.1, "rng_state": STATE[:1]}, "rng_state is int64"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(4, dtype=torch.int64)[::2]}, r"contiguous, got .* strides \(2,\)"),
        ({"dropout_p": 0.1, "rng_state": STATE.to("meta")}, "on the device of q .cpu."),
        ({"dropout_p": 0.1, "rng_state": 3}, "rng_state must be a tensor, got 3"),
    ],
)
def test_every_rule(named: dict[str, Any], message: str) -> None:
    for call in (flashgen.attention, flashgen.reference.attention):
        with pytest.raises(WorkloadError, match=message):
            call(*qkv(), **named)


def test_decoding_has_none() -> None:
    with pytest.raises(TypeError, match="dropout_p"):
        flashgen.attention_decode(*qkv(), torch.ones(1, dtype=torch.int32), dropout_p=0.1)  # type: ignore[call-overload]


def test_functions_and_dropout_go_together_but_have_no_gradient() -> None:
    with pytest.raises(UnsupportedError, match="functions of the caller"):
        flashgen.attention(*qkv(), mask_mod=even, dropout_p=0.1)


def even(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return k_idx % 2 == 0


@pytest.mark.parametrize("dropout_p", [0.0, 1e-9, 2**-16, 0.1, 0.5, 0.9, 1 - 2**-30])
def test_what_is_left_stands_for_all(dropout_p: float) -> None:
    share = threshold(dropout_p) / 2**16
    assert abs(share - dropout_p) <= 2**-16
    assert share < 1
    assert (1 - share) * keep_scale(dropout_p) == pytest.approx(1.0)
