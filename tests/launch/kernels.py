"""Real compiled kernels and matching tensors for the tests of launches; addresses are all that matters of a tensor."""

from __future__ import annotations

import functools

import torch

from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# name: specialization, device, knobs that differ from its default
KERNELS = {
    "descriptors": ("fwd-bf16-d64-causal", "h200", {"loads": "descriptor"}),
    "descriptors-offsets": ("fwd-fp16-d64-causal-offset", "h200", {"loads": "descriptor"}),
    "pointers": ("fwd-bf16-d64-causal", "h200", {"loads": "pointer"}),
    "pointers-sm80": ("fwd-fp16-d64", "a100", {}),
    "descriptors-dv": ("fwd-fp16-d192-dv128", "h200", {"loads": "descriptor"}),
    "pointers-sm80-offsets": ("fwd-bf16-d128-causal-offset", "a100", {}),
    "pointers-unaligned": ("fwd-fp32-d64-unaligned", "h200", {}),
}


@functools.cache
def kernel(name: str) -> tuple[Specialization, Config, CompiledKernel]:
    key, target, changes = KERNELS[name]
    spec, device = Specialization.parse(key), find_device(target)
    config = PORTABLE_FORWARD.default(spec, device).replace(**changes)  # type: ignore[arg-type]
    return spec, config, compile_kernel(spec, config, device)


def tensors(
    spec: Specialization, shape: tuple[int, int, int, int, int] = (2, 6, 3, 200, 333), *, bshd: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and out in bhsd order, for (batch, nheads, nheads_k, seqlen_q, seqlen_k)."""
    batch, nheads, nheads_k, seqlen_q, seqlen_k = shape

    def one(heads: int, rows: int, cols: int) -> torch.Tensor:
        if bshd:
            return torch.empty(batch, rows, heads, cols, dtype=DTYPES[spec.dtype]).transpose(1, 2)
        return torch.empty(batch, heads, rows, cols, dtype=DTYPES[spec.dtype])

    return (
        one(nheads, seqlen_q, spec.head_dim),
        one(nheads_k, seqlen_k, spec.head_dim),
        one(nheads_k, seqlen_k, spec.head_dim_v),
        one(nheads, seqlen_q, spec.head_dim_v),
    )
