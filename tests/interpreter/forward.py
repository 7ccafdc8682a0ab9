"""Forward passes of kernels that stand alone, in small tiles, and how near the oracle they are."""

from __future__ import annotations

import torch

from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import render_standalone
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization

# the interpreter multiplies exactly, and knows no products in parts
SMALL = {"block_m": 32, "block_n": 32, "num_warps": 2, "num_stages": 2, "products": "ieee"}
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}


def config_for(spec: Specialization, **changes: int | str | bool) -> Config:
    return PORTABLE_FORWARD.default(spec, find_device("h200")).replace(**{**SMALL, **changes})


def compare(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = got
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-3, rtol=1e-5)


def tensors(
    shape: tuple[int, ...], head_dim: int, head_dim_v: int, dtype: torch.dtype, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nheads, nheads_k, seqlen_q, seqlen_k = shape
    generator = torch.Generator().manual_seed(sum(shape) + head_dim)

    def one(heads: int, rows: int, cols: int) -> torch.Tensor:
        if layout == "bshd":
            return torch.randn(batch, rows, heads, cols, generator=generator).to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, rows, cols, generator=generator).to(dtype)

    return one(nheads, seqlen_q, head_dim), one(nheads_k, seqlen_k, head_dim), one(nheads_k, seqlen_k, head_dim_v)


def run(
    spec: Specialization, config: Config, *arguments: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    source = render_standalone(spec, config)
    result: tuple[torch.Tensor, torch.Tensor] = getattr(load_module(source), f"{source.entry}_call")(
        *arguments, **options
    )
    return result
