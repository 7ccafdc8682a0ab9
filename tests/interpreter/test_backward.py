"""Numerics of the rendered backward kernels on a CPU, through Triton's interpreter, against autograd in float64.

`test_backward_covering` has pairs of all features; here are shapes, head dimensions, offsets, what hidden keys hold.
"""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.build import load_module
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.portable_backward import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.interpreter.dense import Rules, gradients, unseen_keys
from tests.interpreter.test_forward import tensors

H200 = find_device("h200")
SMALL = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
SMALL_DQ = {f"dq_{name}": value for name, value in SMALL.items()}
TOLERANCE = {torch.float16: 5e-3, torch.float32: 1e-5}
"""Of the largest value of a gradient, or of 1 where that is less."""

FAMILY = pytest.mark.parametrize("row", [PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED], ids=lambda row: row.id[18:])
LOADS = pytest.mark.parametrize("loads", ["descriptor", "pointer"])


def check(
    row: KernelFamily,
    key: str,
    shape: tuple[int, ...],
    rules: Rules,
    *,
    layout: str = "bshd",
    garbage: float | None = None,
    with_dlse: bool = True,
    host: dict[str, object] | None = None,
    **knobs: int | str | bool,
) -> dict[str, torch.Tensor]:
    """Run the kernels of a specialization on random tensors and compare every gradient; unseen keys hold `garbage`."""
    spec = Specialization.parse(key)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.float32
    q, k, v = tensors(shape, spec.head_dim, spec.head_dim_v, dtype, layout)
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(*q.shape[:3], spec.head_dim_v, generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:3], generator=generator) if with_dlse else None
    expected = gradients(q, k, v, dout, dlse, rules)
    if garbage is not None:
        hidden = unseen_keys(q, k, rules)
        k, v = k.masked_fill(hidden, garbage), v.masked_fill(hidden, garbage)
    small = SMALL | (SMALL_DQ if row is PORTABLE_BACKWARD_SPLIT else {})
    source = render(spec, row.default(spec, H200).replace(**{**small, **knobs}))
    kernel = getattr(load_module(source), f"{source.entry}_call")
    out, lse = expected["out"].to(dtype), expected["lse"].float()
    names = ["dq", "dk", "dv", "neg_delta", "dbias"]
    got = dict(zip(names, kernel(q, k, v, out, lse, dout, dlse=dlse, **(host or {})), strict=False))
    compare(got, expected, TOLERANCE[dtype])
    return got


def compare(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name in [name for name in ("dq", "dk", "dv", "dbias") if name in got]:
        right = expected[name]
        if name == "dbias" and got[name].dim() == 3:  # of a bias of keys every head's own, which the caller sums
            right = right[:, :, 0]
            got[name] = _summed(got[name], right.shape)
        atol = tolerance * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(
            got[name].double(), right, atol=atol, rtol=0, msg=lambda text, name=name: name + text
        )


def _summed(heads: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    axes = [axis for axis in (0, 1) if shape[axis] == 1]
    return heads.double().sum(axes, keepdim=True) if axes else heads


@FAMILY
@LOADS
@pytest.mark.parametrize("causal", ["", "-causal"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 4, 2, 33, 70), (1, 2, 1, 64, 64), (1, 3, 3, 40, 17)])
def test_shapes(row: KernelFamily, loads: str, causal: str, shape: tuple[int, ...]) -> None:
    check(row, f"bwd-fp16-d32{causal}", shape, Rules(causal=bool(causal)), loads=loads)
