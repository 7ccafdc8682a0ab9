"""Rendered files on their own: their launchers, which nothing else of flashgen runs, against dense attention."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen.codegen.families import FAMILIES, unsupported
from flashgen.codegen.render import render
from flashgen.core.workload import Specialization
from flashgen.launch.gpu import current_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BATCH, HEADS, HEADS_K, QUERIES, KEYS = 2, 4, 2, 200, 333
"""Lengths that no block divides, and a group of two."""

FORWARD = (
    "fwd-bf16-d64",
    "fwd-bf16-d128-causal",
    "fwd-fp16-d192-dv128-causal",
    "fwd-bf16-d64-causal-window-sink-softcap",
)
BACKWARD = ("bwd-bf16-d64-causal", "bwd-bf16-d128", "bwd-fp16-d256-causal")


def standalone(key: str, family: str, folder: Path) -> ModuleType:
    """The rendered default config of a family, imported as a user would; skips what the family does not do here."""
    spec, device = Specialization.parse(key), current_device()
    row = next(each for each in FAMILIES if each.id == family)
    reason = unsupported(row, spec, device)
    if reason is not None:
        pytest.skip(reason)
    path = folder / "kernel.py"
    path.write_text(render(spec, row.default(spec, device)).text)
    found = importlib.util.spec_from_file_location("rendered_kernel", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def features(call: Callable[..., Any]) -> dict[str, Any]:
    """What a launcher asks for beside the tensors of every call."""
    known = {"window": (64, None), "softcap": 3.0, "sinks": torch.randn(HEADS, device="cuda")}
    return {name: known[name] for name in inspect.signature(call).parameters if name in known}


def tensors(spec: Specialization) -> tuple[torch.Tensor, ...]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]
    shapes = ((HEADS, QUERIES, spec.head_dim), (HEADS_K, KEYS, spec.head_dim), (HEADS_K, KEYS, spec.head_dim_v))
    torch.manual_seed(3)
    return tuple(torch.randn(BATCH, *shape, device="cuda", dtype=dtype) for shape in shapes)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE from the definition, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
    scores = q.double() @ k.mT / q.shape[-1] ** 0.5
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    distance = torch.arange(KEYS, device="cuda") - torch.arange(QUERIES, device="cuda")[:, None] - (KEYS - QUERIES)
    if causal:
        scores = scores.masked_fill(distance > 0, float("-inf"))
    if "window" in options:
        scores = scores.masked_fill(distance < -options["window"][0], float("-inf"))
    sums = scores.logsumexp(-1)
    if "sinks" in options:
        sums = torch.logaddexp(sums, options["sinks"].double()[:, None])
    return (scores - sums[..., None]).exp() @ v, sums


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("family", [row.id for row in FAMILIES if row.direction == "forward"])
@pytest.mark.parametrize("key", FORWARD)
def test_a_rendered_forward_pass_runs_by_itself(key: str, family: str, tmp_path: Path) -> None:
    spec = Specialization.parse(key)
    q, k, v = tensors(spec)
    call = getattr(standalone(key, family, tmp_path), f"{family}_call")
    options = features(call)
    out, lse = call(q, k, v, **options)
    right, sums = dense(q, k, v, spec.causal, options)
    assert distance(out, right) < 5e-3
    assert float((lse - sums).abs().max()) < 2e-3
    out, _ = call(q[:, :, :0], k, v, **options)
    assert out.shape == (BATCH, HEADS, 0, spec.head_dim_v)


@pytest.mark.parametrize("family", [row.id for row in FAMILIES if row.direction == "backward"])
@pytest.mark.parametrize("key", BACKWARD)
def test_a_rendered_backward_pass_runs_by_itself(key: str, family: str, tmp_path: Path) -> None:
    spec = Specialization.parse(key)
    leaves = [tensor.double().requires_grad_() for tensor in tensors(spec)]
    q, k, v = tensors(spec)
    out, lse = dense(*leaves, spec.causal, {})
    dout = torch.randn_like(out).to(q.dtype)
    right = torch.autograd.grad(out, leaves, dout.double())
    call = getattr(standalone(key, family, tmp_path), f"{family}_call")
    found = call(q, k, v, out.detach().to(q.dtype), lse.detach().float(), dout)[:3]
    assert max(distance(gradient, known) for gradient, known in zip(found, right, strict=True)) < 1e-2
