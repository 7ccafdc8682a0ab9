"""One first call: run by `benchmarks.first_call` in a process of its own, it prints milliseconds.

It imports nothing but torch before the clock starts, so nothing of flashgen or of the other benchmarks.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

import torch

Tensor = torch.Tensor
BACKENDS = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION"}

WITHOUT_COMPILER = "flashgen-without-compiler"
"""Flashgen, where importing Triton fails."""


def call_ms(attend: Callable[[Tensor, Tensor, Tensor], object], shape: tuple[int, ...]) -> float:
    """Milliseconds of the first call of `attend`, with causal bf16 tensors (batch, nheads, seqlen, head_dim)."""
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    attend(q, k, v)
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e6


def by_flashgen(q: Tensor, k: Tensor, v: Tensor) -> object:
    """Flashgen, whose import counts."""
    import flashgen

    return flashgen.attention(q, k, v, causal=True)


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> object:
    """SDPA on the backend that is allowed."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


if __name__ == "__main__":
    impl, *sizes = sys.argv[1:]
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if impl == WITHOUT_COMPILER:
        sys.modules["triton"] = None  # type: ignore[assignment] # which makes an import of it fail
    if impl in BACKENDS:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context = sdpa_kernel(getattr(SDPBackend, BACKENDS[impl]))
    with context, torch.no_grad():
        print(call_ms(by_torch if impl in BACKENDS else by_flashgen, tuple(int(size) for size in sizes)))
