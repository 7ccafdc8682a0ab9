"""`flashgen.attention` with few queries, which a decode family serves, beside the forward families and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.families import DECODE_FAMILIES
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import Call

pytestmark = pytest.mark.gpu

DECODING = {row.id for row in DECODE_FAMILIES}

BF16 = torch.bfloat16

CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "one query, causal": {"causal": True},
    "four queries, causal": {"seqlen_q": 4, "causal": True},
    "sixteen queries": {"seqlen_q": 16, "nheads": 8},
    "window": {"causal": True, "window": (700, None)},
    "window of both sides": {"seqlen_q": 5, "window": (2500, 2)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "slopes of a batch": {"alibi": True, "seqlen_q": 3, "causal": True},
    "scale": {"softmax_scale": 0.3},
    "unequal heads": {"head_dim": 96, "head_dim_v": 80, "nheads": 7, "nheads_k": 1, "dtype": torch.float16},
    "heads of their own": {"nheads": 4, "nheads_k": 4},
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


def made(
    *,
    batch: int = 2,
    seqlen_q: int = 1,
    seqlen_k: int = 3000,
    nheads: int = 16,
    nheads_k: int = 2,
    head_dim: int = 128,
    head_dim_v: int = 0,
    dtype: torch.dtype = BF16,
    sinks: bool = False,
    alibi: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v in bhsd order, and the other arguments."""
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    inputs = [normal(batch, nheads, seqlen_q, head_dim), normal(batch, nheads_k, seqlen_k, head_dim)]
    inputs.append(normal(batch, nheads_k, seqlen_k, head_dim_v or head_dim))
    options |= {"sinks": torch.randn(nheads, device="cuda")} if sinks else {}
    options |= {"alibi_slopes": torch.rand(batch, nheads, device="cuda")} if alibi else {}
    return inputs, options


def reference(inputs: list[torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64."""
    q, k, v = (tensor.double() for tensor in inputs)
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    s = q @ k.transpose(-1, -2) * options.get("softmax_scale", q.shape[-1] ** -0.5)
    if options.get("softcap"):
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    place = torch.arange(q.shape[2], device="cuda")[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2], device="cuda")
    if "alibi_slopes" in options:
        s = s - options["alibi_slopes"].double()[:, :, None, None] * (place - keys).abs()
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    if left is not None:
        s = s.masked_fill(keys < place - left, -torch.inf)
    if right is not None:
        s = s.masked_fill(keys > place + right, -torch.inf)
    if "sinks" in options:
        sinks = options["sinks"].double()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sinks], -1)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse[..., None])[..., : k.shape[2]] @ v, lse


@pytest.mark.parametrize("bshd", [False, True], ids=["bhsd", "bshd"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_and_served_by_decoding(name: str, bshd: bool) -> None:
    inputs, options = made(**CASES[name])
    right, right_lse = reference(inputs, options)
    given = [tensor.transpose(1, 2).contiguous() for tensor in inputs] if bshd else inputs
    layout = "bshd" if bshd else "bhsd"
    assert flashgen.explain(*given, layout=layout, **options).served.config.family in DECODING
    out, lse = flashgen.attention(*given, layout=layout, return_lse=True, **options)
    alone = flashgen.attention(*given, layout=layout, **options)
    assert torch.equal(out, alone)
    assert out.is_contiguous()
    out = out.transpose(1, 2) if bshd else out
    torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=2e-3)


def test_other_lengths_and_scales_find_their_launches() -> None:
    for seqlen_k in (1500, 1501, 1502, 1503, 4000):
        inputs, options = made(seqlen_k=seqlen_k, causal=True)
        right, _ = reference(inputs, options)
        torch.testing.assert_close(flashgen.attention(*inputs, **options).double(), right, atol=2e-2, rtol=2e-2)
        for scale in (0.1, 0.2):
            right, _ = reference(inputs, {**options, "softmax_scale": scale})
            out = flashgen.attention(*inputs, **options, softmax_scale=scale)
            torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)


def test_a_query_offset_and_a_config_are_served_by_forward_families() -> None:
    inputs, options = made(causal=True)
    out = flashgen.attention(*inputs, **options)
    explained = flashgen.explain(*inputs, **options, q_offset=2999)
    assert explained.served.config.family not in DECODING
    torch.testing.assert_close(flashgen.attention(*inputs, **options, q_offset=2999), out, atol=2e-2, rtol=2e-2)
    q, k, v = inputs
    forward = serve.prepare(Call(q=q, k=k, v=v, causal=True, config=explained.served.config))
    torch.testing.assert_close(forward(q, k, v, None, None), out, atol=2e-2, rtol=2e-2)


def test_in_a_graph_and_under_torch_compile() -> None:
    inputs, options = made(causal=True)
    expected = flashgen.attention(*inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(*inputs, **options)
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(lambda q, k, v: flashgen.attention(q, k, v, causal=True) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), expected * 2)


def test_it_trains() -> None:
    inputs, options = made(causal=True)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    flashgen.attention(*leaves, **options).float().square().sum().backward()
    doubles = [tensor.double().requires_grad_() for tensor in inputs]
    q, k, v = doubles
    keys, values = (tensor.repeat_interleave(8, 1) for tensor in (k, v))
    right = torch.softmax(q @ keys.transpose(-1, -2) * 128**-0.5, -1) @ values
    right.square().sum().backward()
    for leaf, double in zip(leaves, doubles, strict=True):
        assert leaf.grad is not None
        assert double.grad is not None
        scale = double.grad.abs().max()
        assert (leaf.grad.double() - double.grad).abs().max() < 3e-2 * scale
    with pytest.raises(WorkloadError):
        flashgen.attention(*inputs, causal=True, q_offset=1.5)  # type: ignore[arg-type]
