"""Repeated calls of `flashgen.attention`: found without a key, unless anything about them has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.runtime.ops import backward, forward, recent, serve
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.layouts import shifted

Tensor = torch.Tensor
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(rows: int = 48, nheads: int = 4, seed: int = 0, **options: Any) -> Inputs:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, heads, rows, 64, **options) for heads in (nheads, 2, 2))
    return q, k, v


@pytest.fixture(autouse=True)
def gpu(emulated: EmulatedGpu) -> EmulatedGpu:
    return emulated


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The keys that calls make from now on."""
    made: list[tuple[Any, ...]] = []

    def remembered(key: tuple[Any, ...]) -> Any:
        made.append(key)
        return serve.MEMO.get(key)

    for module in (forward, backward):
        monkeypatch.setattr(module, "_remembered", remembered)
    return made


def train(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]
    out = flashgen.attention(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout))


def test_the_third_call_of_its_kind_makes_no_key(keys: list[Any]) -> None:
    for seed in range(2):
        flashgen.attention(*inputs(seed=seed), causal=True)
    made = len(keys)
    given = inputs(seed=2)
    again = flashgen.attention(*given, causal=True)
    assert len(keys) == made
    flashgen.reload()
    assert not recent.RECENT
    assert torch.equal(again, flashgen.attention(*given, causal=True))
    assert len(keys) > made


def test_nor_does_training(keys: list[Any]) -> None:
    for seed in range(2):
        train(*inputs(seed=seed))
    made = len(keys)
    given = inputs(seed=2)
    again = train(*given)
    assert len(keys) == made
    flashgen.reload()
    for one, other in zip(again, train(*given), strict=True):
        assert torch.equal(one, other)
    assert len(keys) > made


@pytest.mark.parametrize(("attend", "module"), [(flashgen.attention, forward), (train, backward)])
def test_a_reload_between_the_memo_and_what_is_found_sooner_forgets_both(
    attend: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another thread: the record of before would serve calls like this one until the next reload."""

    def remembered(key: tuple[Any, ...]) -> Any:
        found = serve.MEMO.get(key)
        flashgen.reload()
        return found

    for known in (1, 2):  # the first such call, and one that was found sooner before
        for _ in range(known):
            attend(*inputs())
        recent.RECENT.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, "_remembered", remembered)
            attend(*inputs())
        assert not recent.RECENT


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES: dict[str, tuple[Callable[[Inputs], Inputs], dict[str, Any]]] = {
    "another length": (lambda given: inputs(rows=50), {}),
    "other heads": (lambda given: inputs(nheads=2), {}),
    "another dtype": (lambda given: inputs(dtype=torch.bfloat16), {}),
    "other strides of q": (lambda given: (_swapped(given[0]), *given[1:]), {}),
    "other strides of v": (lambda given: (*given[:2], _swapped(given[2])), {}),
    "an odd address": (lambda given: (given[0], shifted(given[1]), given[2]), {}),
    "causal": (lambda given: given, {"causal": True}),
    "the layout": (lambda given: given, {"layout": "bshd"}),
    "an offset": (lambda given: given, {"causal": True, "q_offset": 3}),
    "one tensor as two": (lambda given: (given[0], given[1], given[1]), {}),
    "determinism": (lambda given: given, {"deterministic": True}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("attend", [lambda *given, **named: (flashgen.attention(*given, **named),), train])
def test_what_has_changed_is_another_call(attend: Any, change: str) -> None:
    changed, options = CHANGES[change]
    given = changed(inputs())
    if "layout" in options:
        given = tuple(one.transpose(1, 2).contiguous() for one in inputs(rows=4))  # type: ignore[assignment]
    expected = attend(*given, **options)
    flashgen.reload()
    for _ in range(3):
        attend(*inputs(seed=1))
    for one, other in zip(attend(*given, **options), expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


@pytest.mark.parametrize("dout", [_swapped, shifted, lambda one: one[..., :1].expand(one.shape)])
def test_another_gradient_is_another_call(dout: Callable[[Tensor], Tensor]) -> None:
    given = inputs()
    grad = torch.randn(1, 4, 48, 64)
    expected = train(*given, dout(grad).contiguous())
    for _ in range(3):
        train(*given, grad.clone())
    for one, other in zip(train(*given, dout(grad)), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_softmax_scale_is_no_part_of_it(keys: list[Any], gpu: EmulatedGpu) -> None:
    made = []
    for scale in (None, 0.5, 0.25):
        flashgen.attention(*inputs(), softmax_scale=scale)
        made.append(len(keys))
    assert made[1] == made[2]
    assert [launched.scale for launched in gpu.launched] == [None, 0.5, 0.25]


def test_two_layouts_in_turns_make_no_keys_and_three_do(keys: list[Any]) -> None:
    first, second, third = inputs(), inputs(rows=50), inputs(rows=52)
    for _ in range(2):
        flashgen.attention(*first)
        flashgen.attention(*second)
    made = len(keys)
    flashgen.attention(*first)
    flashgen.attention(*second)
    assert len(keys) == made
    for _ in range(2):
        for given in (first, second, third):
            flashgen.attention(*given)
    assert len(keys) > made
    (flags,) = recent.RECENT
    assert len(recent.RECENT[flags]) == recent.MOST_LAYOUTS


def test_tensors_of_inference_are_other_ones(keys: list[Any]) -> None:
    for _ in range(3):
        flashgen.attention(*inputs())
    made = len(keys)
    with torch.inference_mode():
        flashgen.attention(*inputs())
        assert len(keys) == made + 1
        flashgen.attention(*inputs())
    flashgen.attention(*inputs())
    assert len(keys) == made + 1, "both are known"


def test_a_length_that_never_comes_back_leaves_no_question() -> None:
    flashgen.attention(*inputs())
    assert not recent.RECENT
    assert not recent._ENTRIES


def test_without_the_parts_of_torch_that_it_uses_keys_are_made(
    keys: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "_QUESTION", None)
    for _ in range(4):
        made = len(keys)
        flashgen.attention(*inputs())
        assert len(keys) > made
    assert not recent.RECENT


def test_no_more_is_kept_than_the_memo_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MEMO_LIMIT", 3)
    for rows in range(20, 32):
        for _ in range(3):
            flashgen.attention(*inputs(rows))
        assert len(serve.MEMO) <= 3
        assert 0 < len(recent._ENTRIES) <= 3
