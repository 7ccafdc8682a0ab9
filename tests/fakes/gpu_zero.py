"""Tensors of the CPU that claim to be on GPU 0, an H200, whose driver is an imagined one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from flashgen.core.device import find_device
from flashgen.launch import allocation, driver, plan
from flashgen.runtime.ops import serve
from tests.fakes.driver import FakeDriver

H200 = find_device("h200")


@contextlib.contextmanager
def on_gpu_zero(fake: FakeDriver, patch: pytest.MonkeyPatch, stream: Callable[[], int] = lambda: 7) -> Iterator[None]:
    """Have calls go to a driver, on a stream that may change."""
    patch.setattr(driver, "library", lambda: fake)
    patch.setattr(plan, "_FUNCTIONS", {})
    patch.setattr(serve, "device_at", lambda index: H200)
    patch.setattr(serve, "gpu_index", lambda tensor: 0)
    patch.setattr(allocation.GUARDS, "_empty_strided_cuda", allocation.GUARDS._empty_strided_cpu)
    for name, value in (("_cuda_getCurrentRawStream", lambda index: stream()), ("_cuda_getDevice", lambda: 0)):
        patch.setattr(torch._C, name, value, raising=False)
    patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    driver._primary_context.cache_clear()
    yield
    driver._primary_context.cache_clear()
