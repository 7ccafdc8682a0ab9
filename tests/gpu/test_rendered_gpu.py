"""Printed files on their own: their launchers, which nothing else of flashgen runs, against dense attention."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashgen.cli.main import app
from flashgen.codegen.families import FAMILIES, unsupported
from flashgen.codegen.render import render_standalone
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
    return imported(render_standalone(spec, row.default(spec, device)).text, folder)


def imported(text: str, folder: Path) -> ModuleType:
    path = folder / "kernel.py"
    path.write_text(text)
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
    queries, keys = scores.shape[2:]
    distance = torch.arange(keys, device="cuda") - torch.arange(queries, device="cuda")[:, None] - (keys - queries)
    if "bias" in options:
        scores = scores + options["bias"].double()
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


ODD = {
    "d100": ("d100-causal", ()),
    "d17": ("d17", ()),
    "rows of 68": ("d64", ("--unaligned",)),
    "bias of 77 keys": ("d64-bias", ()),
}
"""Tensors of which a kernel for aligned ones made NaN or wrong numbers: what is computed, and options that it takes."""


def shape_of(case: str, direction: str) -> str:
    keys = 77 if "77" in case else KEYS
    return f"{direction}-b{BATCH}-h{HEADS}-hk{HEADS_K}-sq{QUERIES}-sk{keys}-{ODD[case][0]}"


def printed(folder: Path, *arguments: str) -> tuple[ModuleType, str]:
    """The module that `flashgen render` prints, and the id of its family."""
    result = CliRunner().invoke(app, ["render", *arguments])
    assert result.exit_code == 0, result.stderr
    family = result.stdout.split("--config ")[1].split(":")[0]
    return imported(result.stdout, folder), family


def odd_tensors(case: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """q, k and v in bf16, and the bias of a call."""
    torch.manual_seed(4)
    dim, keys = {"d100": 100, "d17": 17}.get(case, 64), 77 if "77" in case else KEYS
    columns = 68 if "68" in case else dim
    rows = ((HEADS, QUERIES), (HEADS_K, keys), (HEADS_K, keys))
    found = [torch.randn(BATCH, *each, columns, device="cuda", dtype=torch.bfloat16)[..., :dim] for each in rows]
    bias = torch.randn(BATCH, HEADS, QUERIES, keys, device="cuda", dtype=torch.bfloat16)
    return found, {"bias": bias} if "77" in case else {}


@pytest.mark.parametrize("case", ODD)
def test_what_is_printed_is_right_for_tensors_that_are_not_aligned(case: str, tmp_path: Path) -> None:
    (q, k, v), host = odd_tensors(case)
    module, family = printed(tmp_path, shape_of(case, "fwd"), *ODD[case][1])
    out, lse = getattr(module, f"{family}_call")(q, k, v, **host)
    right, sums = dense(q, k, v, "causal" in ODD[case][0], host)
    assert distance(out, right) < 5e-3
    assert float((lse - sums).abs().max()) < 2e-3


@pytest.mark.parametrize("case", ODD)
def test_a_printed_backward_pass_is_right_for_tensors_that_are_not_aligned(case: str, tmp_path: Path) -> None:
    (q, k, v), host = odd_tensors(case)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v, *host.values())]
    out, lse = dense(*leaves[:3], "causal" in ODD[case][0], dict(zip(host, leaves[3:], strict=True)))
    dout = torch.randn_like(out).to(q.dtype)
    right = torch.autograd.grad(out, leaves, dout.double())
    module, family = printed(tmp_path, shape_of(case, "bwd"), *ODD[case][1])
    call = getattr(module, f"{family}_call")
    dq, dk, dv, _, *dbias = call(q, k, v, out.detach().to(q.dtype), lse.detach().float(), dout, **host)
    found = (dq, dk, dv, *dbias)
    assert max(distance(gradient, known) for gradient, known in zip(found, right, strict=True)) < 1e-2


MISALIGNED = {
    "starts at a multiple of 16 bytes": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view_as(x),
    "are multiples of 8 elements": lambda x: torch.nn.functional.pad(x, (0, 4))[..., :64],
    "is a tensor of torch.bfloat16": lambda x: x.half(),
    "is on the device of q, cuda:0, got cpu": lambda x: x.cpu(),
}
"""What is refused of any tensor, by what it is told."""


@pytest.mark.parametrize("family", [row.id for row in FAMILIES])
def test_a_kernel_for_aligned_tensors_refuses_others(family: str, tmp_path: Path) -> None:
    is_forward = "forward" in family
    module = standalone("fwd-bf16-d64" if is_forward else "bwd-bf16-d64", family, tmp_path)
    q, k, v = tensors(Specialization.parse("fwd-bf16-d64"))
    given = {"q": q, "k": k, "v": v}
    if not is_forward:
        given |= {"out": q.clone(), "lse": torch.zeros(q.shape[:3], device="cuda"), "dout": q.clone()}
    call = getattr(module, f"{family}_call")
    call(**given)
    for name in given.keys() - {"lse"}:
        for message, change in MISALIGNED.items():
            if (name, "device" in message) != ("q", True):
                with pytest.raises(ValueError, match=rf"{name} {message}|strides of {name} {message}"):
                    call(**given | {name: change(given[name])})
    with pytest.raises(ValueError, match="tensors are on the current GPU, got cpu"):
        call(**{name: tensor.cpu() for name, tensor in given.items()})
