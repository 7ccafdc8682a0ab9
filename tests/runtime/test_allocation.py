"""Memory by one call past torch's dispatcher, on the GPU of the tensors of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.launch import allocation
from flashgen.runtime.ops import backward_runs, runs

LAYOUT = (2, 3, 4, 8), (96, 32, 8, 1), torch.bfloat16


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_a_layout_is_that_of_the_tensor_and_of_its_view(bshd: bool, swap: bool) -> None:
    tensor = torch.zeros(2, 3, 4, 8)
    tensor = tensor.transpose(1, 2) if swap else tensor
    view = tensor.transpose(1, 2) if bshd else tensor
    layout = allocation.layout_of_view(tuple(view.shape), view.stride(), view.dtype, bshd=bshd)
    assert layout == allocation.layout_of(tensor)
    assert allocation.layout_of(allocation.empty_beside(tensor)(*layout)) == layout


def test_without_the_part_of_torch_that_it_uses_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.delattr(allocation.GUARDS, "_empty_strided_cuda")
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **named: asked.append((given, named)))
    allocation.empty_on_current()(*LAYOUT)
    shape, strides, dtype = LAYOUT
    assert asked == [((shape, strides), {"dtype": dtype, "device": torch.device("cuda")})]


class TwoGpus:
    """Which of two GPUs is current, and where each tensor was allocated."""

    def __init__(self) -> None:
        self.current = 0
        self.allocated: list[int] = []

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def empty(self, *layout: Any) -> torch.Tensor:
        self.allocated.append(self.current)
        return torch.empty(1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    state = TwoGpus()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", state.device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.current, raising=False)
    for module in (runs, backward_runs):
        monkeypatch.setattr(module, "empty_beside", lambda tensor: state.empty)
    return state


def on_gpu(index: int) -> Any:
    return SimpleNamespace(device=torch.device("cuda", index), get_device=lambda: index)


@pytest.mark.parametrize("lse_shape", [None, (2, 3, 4)])
def test_outputs_are_allocated_on_the_gpu_of_the_call(gpus: TwoGpus, lse_shape: Any) -> None:
    launched: list[int] = []
    run = runs.kernel_run(lambda *given: launched.append(gpus.current), on_gpu(1), LAYOUT, lse_shape=lse_shape)
    packed = runs.packed_run(
        lambda *given: launched.append(gpus.current), on_gpu(1), same_head_dim=True, lse_shape=lse_shape and (3, 4)
    )
    q: Any = torch.empty(1, 4, 3, 8)
    for call in (run, packed):
        call(q, q, q, None, None, None)
    assert launched == [1, 1]
    assert set(gpus.allocated) == {1}
    assert gpus.current == 0


def test_gradients_are_allocated_on_the_gpu_of_the_call(gpus: TwoGpus) -> None:
    launched: list[int] = []

    def launch(*given: Any) -> Any:
        launched.append(gpus.current)

    q: Any = torch.empty(1, 4, 3, 8)
    plain = backward_runs.plain_run_maker(on_gpu(1), copies_dout=False)(launch, [LAYOUT] * 3)
    packed = backward_runs.packed_run(launch, on_gpu(1), (torch.empty_like,) * 3, copies_dout=False)
    for call in (plain, packed):
        call(q, None, q, q, q, q, q, None, None, None)
    assert launched == [1, 1]
    assert gpus.allocated == [1] * 6


def test_one_gpu_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert allocation.elsewhere(on_gpu(0)) is None
    assert allocation.elsewhere(torch.empty(1)) is None
