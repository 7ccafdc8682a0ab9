"""One call in a process of its own, through everything but the GPU: run as a script, it prints what it has imported."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

import torch

LOADED = set(sys.modules)


def install(target: str) -> None:
    """The fake driver in the place of the real one, and a GPU that is not there."""
    from flashgen.core.device import find_device
    from flashgen.launch import driver
    from flashgen.runtime.ops import serve
    from tests.fakes.driver import FakeDriver

    cuda, found = FakeDriver(), find_device(target)
    cuda.cuLaunchKernelEx = lambda *asked: 0  # type: ignore[method-assign]
    driver.library = lambda: cuda
    serve.gpu_index = lambda tensor: 0
    serve.device_at = lambda index: found

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        yield

    torch.cuda.device = device  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda: None  # type: ignore[assignment,return-value]
    torch.cuda.device_count = lambda: 1
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._cuda_getDevice = lambda: 0


def tensors(seqlen: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the shape that the benchmark of host time has."""
    q, k, v = (torch.empty(1, 8, seqlen, 128, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


if __name__ == "__main__":
    import flashgen

    install(sys.argv[1])
    for seqlen in (128, 300):
        flashgen.attention(*tensors(seqlen), causal=True)
    print(json.dumps(sorted(set(sys.modules) - LOADED)))
