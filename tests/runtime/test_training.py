"""Gradients through the public call on an emulated GPU: every feature, alone and with others, against torch's own."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.dense_attention import dense
from tests.runtime.training import FEATURES, SK, SQ, H, assert_gradients, double, leaf, mask, qkv
from tests.tiers import first

pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")


@pytest.mark.parametrize("layout", first(1, ["bhsd", "bshd"]))
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_those_of_torch(name: str, layout: str, emulated: EmulatedGpu) -> None:
    arguments = {**FEATURES[name](), "layout": layout}
    for lse in (False, True):
        assert_gradients(qkv(layout == "bshd"), arguments, lse=lse)
    assert len(emulated.launched_backward) == 2
    assert len(emulated.planned_backward) == 1, "whether the LSE has a gradient chooses no code"
    assert [spec.direction for spec, _ in emulated.compiled] == ["forward", "backward"]


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of flashgen's ops that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flashgen":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "offset tensor", "sinks", "bias of rows", "everything"])
def test_the_ops_have_the_same_gradients(name: str) -> None:
    for layout in ("bhsd", "bshd"):
        with Seen() as seen:
            assert_gradients(qkv(layout == "bshd"), {**FEATURES[name](), "layout": layout}, lse=True)
        assert seen.names == ["attention_train", "attention_backward"]


@pytest.mark.parametrize("name", ["plain", "offset tensor", "everything"])
def test_a_plain_call_saves_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.runtime.autograd.training.attention_train_op", None)
    monkeypatch.setattr("flashgen.runtime.autograd.functions.attention_backward_op", None)
    for lse in (False, True):
        assert_gradients(qkv(), FEATURES[name](), lse=lse)


def test_who_asks_for_no_gradient_gets_a_forward_pass_without_one(emulated: EmulatedGpu) -> None:
    q, k, v = qkv()
    with torch.no_grad():
        assert not flashgen.attention(q, k, v).requires_grad
    assert not flashgen.attention(q.detach(), k.detach(), v.detach()).requires_grad
    assert [done.lse for done in emulated.launched] == [None, None]
    assert flashgen.attention(q, k.detach(), v.detach()).requires_grad
    assert flashgen.attention(q.detach(), k.detach(), v.detach(), sinks=leaf(H)).requires_grad


@pytest.mark.parametrize("which", range(1, 32))
def test_any_subset_of_inputs_may_require_gradients(which: int) -> None:
    inputs = qkv()
    arguments = {"sinks": leaf(H), "bias": leaf(H, SQ, SK)}
    for number, tensor in enumerate([*inputs, *arguments.values()]):
        tensor.requires_grad_(bool(which >> number & 1))
    assert_gradients(inputs, arguments)


def test_the_lse_alone_may_have_a_gradient() -> None:
    q, k, v = qkv()
    _, lse = flashgen.attention(q, k, v, sinks=torch.zeros(H), return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    truth = [double(x) for x in (q, k, v)]
    expected = torch.autograd.grad(dense(*truth, sinks=torch.zeros(H))[1].sum(), truth[:2])
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    assert not found[2].any()


@pytest.mark.parametrize(("shape", "keys"), [((0, 2, 5, 16), 5), ((2, 2, 0, 16), 5), ((2, 2, 5, 16), 0)])
def test_nothing_to_attend_to_has_gradients_of_zero(
    shape: tuple[int, ...], keys: int, emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.launch.plan import EmptyBackwardPlan, EmptyPlan

    monkeypatch.setattr("flashgen.launch.plan.make_plan", lambda *_: EmptyPlan())
    monkeypatch.setattr("flashgen.launch.plan.make_backward_plan", lambda *_: EmptyBackwardPlan())
    q, k, v = leaf(*shape), leaf(shape[0], 2, keys, 16), leaf(shape[0], 2, keys, 16)
    extra = {"sinks": leaf(2), "bias": leaf(2, shape[2], keys)}
    out, lse = flashgen.attention(q, k, v, **extra, return_lse=True)
    (out.sum() + lse.sum()).backward()
    for tensor in (q, k, v, extra["bias"]):
        assert tensor.grad is not None
        assert not tensor.grad.any()
    expected = shape[0] * shape[2] if keys == 0 else 0.0
    assert extra["sinks"].grad.tolist() == [expected, expected], "without keys the LSE is the sink"


def test_gradients_accumulate_and_a_graph_may_be_kept() -> None:
    q, k, v = qkv()
    out = flashgen.attention(q, k, v)
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(q.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_a_changed_input_is_noticed() -> None:
    q, k, v = qkv()
    out = flashgen.attention(q * 1, k, v, mask=(changed := mask(SQ, SK)))
    changed.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_second_derivative_is_refused_with_the_rule(is_seen: bool) -> None:
    q, k, v = qkv()
    with Seen() if is_seen else warnings.catch_warnings():
        out = flashgen.attention(q, k, v)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(UnsupportedError, match="first derivatives only, and a gradient of its gradient"):
            dq.sum().backward()


def test_threads_run_backward_passes_of_their_own(emulated: EmulatedGpu) -> None:
    failed: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                assert_gradients([leaf(1, 2, 8, 16, seed=seed + n) for n in range(3)], {"causal": True})
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [spec.direction for spec, _ in emulated.compiled] == ["forward", "backward"]


def test_random_calls_have_the_gradients_of_torch() -> None:
    rng = random.Random(0)
    for _ in range(12):
        names = rng.sample(sorted(FEATURES), 3)
        arguments: dict[str, Any] = {"layout": rng.choice(["bhsd", "bshd"]), "deterministic": rng.random() < 0.5}
        for name in names:
            arguments |= FEATURES[name]()
        if "q_offset" in arguments and not {"causal", "window", "alibi_slopes"} & set(arguments):
            del arguments["q_offset"]
        assert_gradients(qkv(arguments["layout"] == "bshd"), arguments, lse=rng.random() < 0.5)
