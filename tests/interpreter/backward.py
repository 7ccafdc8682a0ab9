"""Backward passes of kernels that stand alone, in small tiles, and how near autograd's gradients they are."""

from __future__ import annotations

import torch

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_SPLIT
from flashgen.codegen.render import render_standalone
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.interpreter.dense import Rules, gradients, unseen_keys
from tests.interpreter.forward import tensors

H200 = find_device("h200")
SMALL = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
SMALL_DQ = {f"dq_{name}": value for name, value in SMALL.items()}
TOLERANCE = {torch.float16: 5e-3, torch.float32: 1e-5}
"""Of the largest value of a gradient, or of 1 where that is less."""


def check(
    row: KernelFamily,
    key: str,
    shape: tuple[int, ...],
    rules: Rules,
    *,
    layout: str = "bshd",
    gain: float = 1.0,
    garbage: float | None = None,
    with_dlse: bool = True,
    host: dict[str, object] | None = None,
    **knobs: int | str | bool,
) -> dict[str, torch.Tensor]:
    """Run the kernels of a specialization on random tensors and compare every gradient; unseen keys hold `garbage`."""
    spec = Specialization.parse(key)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.float32
    q, k, v = tensors(shape, spec.head_dim, spec.head_dim_v, dtype, layout)
    q, k = (q, k) if gain == 1.0 else (q.abs() * gain, -k.abs())
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(*q.shape[:3], spec.head_dim_v, generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:3], generator=generator) if with_dlse else None
    expected = gradients(q, k, v, dout, dlse, rules)
    if garbage is not None:
        hidden = unseen_keys(q, k, rules)
        k, v = k.masked_fill(hidden, garbage), v.masked_fill(hidden, garbage)
    out, lse = expected["out"].to(dtype), expected["lse"].float()
    names = ["dq", "dk", "dv", "neg_delta", "dbias"]
    got = dict(zip(names, run(row, spec, knobs, q, k, v, out, lse, dout, dlse=dlse, **(host or {})), strict=False))
    compare(got, expected, TOLERANCE[dtype])
    return got


def run(
    row: KernelFamily,
    spec: Specialization,
    knobs: dict[str, int | str | bool],
    *arguments: torch.Tensor,
    **options: object,
) -> tuple[torch.Tensor, ...]:
    small = SMALL | (SMALL_DQ if row is PORTABLE_BACKWARD_SPLIT else {})
    source = render_standalone(spec, row.default(spec, H200).replace(**{**small, "loads": "pointer", **knobs}))
    result: tuple[torch.Tensor, ...] = getattr(load_module(source), f"{source.entry}_call")(*arguments, **options)
    return result


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
