"""Packed training beside dense training: the same operations of torch, and hardly more calls of functions."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.launch import counters, tensor_maps
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.helpers import used_strides
from tests.fakes.driver import FakeDriver
from tests.packing import Case, make

# dense and packed training have the same kernels in most of these: one process compiles them, once
pytestmark = pytest.mark.xdist_group("rows")

Step = Callable[[], object]
Steps = Callable[..., tuple[Step, Step]]

ALLOCATING = (
    "empty_strided",
    "_empty_strided_cpu",
    "empty_like",
    "new_empty",
    "new_zeros",
    "zeros_like",
    "empty",
    "zeros",
    "clone",
    "contiguous",
)
VIEWING = ("unsqueeze", "squeeze", "view", "reshape", "transpose", "as_strided", "detach")
MOST = 1.4
"""How many calls of functions packed training may take for each of dense training: with views and checks it was 1.8.

It is 1.27, without those that follow from where memory lies.
"""


_WRITE = "pointers_writer.<locals>.at_sizes.<locals>.write"
POINTING = ("steps.<locals>.<lambda>", "get", "pack_into", _WRITE, f"{_WRITE}.<locals>.<listcomp>")
"""What is called where memory lies elsewhere than in the step before, as chance has it."""


def calls_of(step: Step) -> Counter[str]:
    """The functions that a step calls, in Python or C: the fewest of some steps.

    All results are kept, so that no gradient is where one before was, whose pointer would not be written again.
    """
    kept: list[object] = []

    def counted() -> Counter[str]:
        found: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                found[frame.f_code.co_qualname if event == "call" else argument.__name__] += 1

        sys.setprofile(note)
        try:
            kept.append(step())
        finally:
            sys.setprofile(None)
        for name in POINTING:
            del found[name]
        return found

    return min((counted() for _ in range(10)), key=Counter.total)


@pytest.fixture
def steps(bare_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What makes a step of training with packed sequences, and one of as many rows in a batch."""
    monkeypatch.setattr(bare_driver, "cuLaunchKernelEx", lambda *given: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # a new descriptor takes 19 calls, which say nothing of packed sequences
    monkeypatch.setattr(tensor_maps.MapPlace, "_describe", lambda place, memory, pointer: 0)
    monkeypatch.setattr(counters, "_FREE", {0: iter(torch.zeros(99, 1, dtype=torch.int32).unbind())})
    return _steps


def _steps(**options: Any) -> tuple[Step, Step]:
    packed = make(Case(queries=(64, 64), nheads=2, nheads_k=2, head_dim=64, dtype=torch.bfloat16))
    rows = [tensor.requires_grad_() for tensor in (packed.q, packed.k, packed.v)]
    batch = [tensor.detach().view(2, 64, 2, 64).requires_grad_() for tensor in rows]
    given, dense_given = torch.ones_like(rows[0]), torch.ones_like(batch[0])

    def packed_step() -> object:
        return torch.autograd.grad(flashgen.attention_varlen(*rows, **packed.named, **options), rows, given)

    def dense_step() -> object:
        return torch.autograd.grad(flashgen.attention(*batch, layout="bshd", **options), batch, dense_given)

    return packed_step, dense_step


def warmed(step: Step) -> Step:
    """As it is once its kernels are compiled, and the plans of its pointers are made."""
    for _ in range(12):
        step()
    return step


def test_packed_training_costs_hardly_more_than_dense_training(steps: Steps) -> None:
    packed, dense = (calls_of(warmed(step)) for step in steps(causal=True))
    for name in (*ALLOCATING, *VIEWING):
        assert packed[name] == dense[name], name
    assert not any(dense[name] for name in VIEWING)
    assert (
        dense["empty_strided"] + dense["_empty_strided_cpu"] == 6
    )  # output and LSE, scratch memory and three gradients
    assert not packed["BackwardCFunction.apply"]  # torch's engine calls the backward functions themselves
    assert not dense["BackwardCFunction.apply"]
    assert packed.total() <= MOST * dense.total()


def test_a_window_and_a_softcap_are_numbers_too(steps: Steps) -> None:
    packed = calls_of(warmed(steps(causal=True, window=(20, 0), softcap=30.0)[0]))
    assert not any(packed[name] for name in VIEWING)


def test_a_step_that_is_known_takes_no_slow_path(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = warmed(steps(causal=True)[0])
    known = len(serve.MEMO)
    monkeypatch.setattr(serve, "prepare", None)
    packed()
    assert len(serve.MEMO) == known


def test_a_second_derivative_is_refused(steps: Steps) -> None:
    packed = make(Case(queries=(64, 64), nheads=2, nheads_k=2, head_dim=64, dtype=torch.bfloat16))
    q = packed.q.requires_grad_()
    out = flashgen.attention_varlen(q, packed.k, packed.v, **packed.named, causal=True)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        torch.autograd.grad(dq, q, torch.ones_like(dq))


def test_torch_lays_out_rows_as_it_lays_out_one_batch_element_of_them() -> None:
    """Of any strides but those of an axis of one: kernels write outputs and gradients with those of the element."""
    seen = set()
    for order in itertools.permutations(range(3)):
        for shape in itertools.product((1, 2, 3), (1, 2, 3), (1, 4)):
            for expanded, room in itertools.product(itertools.product((False, True), repeat=3), (1, 2)):
                own = [1 if expanded[axis] else room * shape[axis] for axis in order]
                back = [order.index(axis) for axis in range(3)]
                whole = torch.empty(own, device="meta").permute(back)
                rows = whole[: shape[0], : shape[1], : shape[2]].expand(shape)
                seen.add((rows.shape, rows.stride()))
                assert used_strides(torch.empty_like(rows)) == used_strides(torch.empty_like(rows.unsqueeze(0)))[1:]
    assert len(seen) > 300
