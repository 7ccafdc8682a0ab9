"""Dropout on a GPU: the weights of the reference in every direction, and bits under seeds, graphs and torch.compile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen import flash_attn, reference
from flashgen.codegen.families import family
from flashgen.core.features.dropout import keep_scale
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.backward_calls import BackwardCall
from flashgen.runtime.ops.calls import Call
from tests.packing import Case, assert_gradients, assert_right, gradients, make

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
P = 0.17


def state(seed: int = 0) -> Tensor:
    return torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(seed)).cuda()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def qkv(seqlen_q: int = 300, seqlen_k: int = 300, head_dim: int = 64, **others: Any) -> list[Tensor]:
    shapes = [(2, 4, seqlen_q, head_dim), (2, 2, seqlen_k, head_dim), (2, 2, seqlen_k, head_dim)]
    return [randn(*shape, seed=number, **others) for number, shape in enumerate(shapes)]


def differentiated(call: Callable[..., Any], leaves: list[Tensor], **named: Any) -> list[Tensor]:
    """Output, LSE and gradients."""
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    out, lse = call(*own, return_lse=True, **named)
    weights = randn(*out.shape, dtype=torch.float32, seed=9).to(out.dtype)
    return [out, lse, *torch.autograd.grad((out * weights).sum(), own)]


CASES: list[tuple[tuple[int, int], int, torch.dtype, dict[str, Any]]] = [
    ((300, 300), 64, torch.bfloat16, {"causal": True}),
    ((1, 333), 128, torch.float16, {}),
    ((257, 113), 128, torch.bfloat16, {"window": (70, 9), "softcap": 20.0}),
    ((113, 203), 256, torch.float16, {"causal": True, "deterministic": True}),
    ((130, 70), 80, torch.float32, {"deterministic": True}),
]


@pytest.mark.parametrize(("lengths", "head_dim", "dtype", "named"), CASES, ids=str)
def test_it_drops_what_the_reference_drops(
    lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, named: dict[str, Any]
) -> None:
    leaves, given = qkv(*lengths, head_dim, dtype=dtype), {**named, "dropout_p": P, "rng_state": state()}
    found = differentiated(flashgen.attention, leaves, **given)
    right = differentiated(reference.attention, [leaf.double() for leaf in leaves], **given)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, right, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("dropout_p", [2**-16, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_weight(dropout_p: float, dtype: torch.dtype) -> None:
    """Values that are the identity make outputs of weights."""
    q, k = randn(1, 2, 500, 128, dtype=dtype), randn(1, 1, 128, 128, dtype=dtype)
    v = torch.eye(128, device="cuda", dtype=dtype).expand(1, 1, 128, 128)
    given = {"dropout_p": dropout_p, "rng_state": state(3)}
    found, right = (call(q, k, v, softmax_scale=0.01, **given) for call in (flashgen.attention, reference.attention))
    assert torch.equal(found == 0, right == 0)


TILES = [(64, 32, 4), (128, 64, 8), (16, 128, 4)]


@pytest.mark.parametrize("family_id", ["portable_backward_split", "portable_backward_fused"])
def test_both_passes_by_any_configs(family_id: str) -> None:
    """Sums of other tiles differ in last digits, other weights in first ones."""
    q, k, v = qkv(head_dim=64)
    features, dout = Features(dropout_p=P, rng_state=state()), randn(2, 4, 300, 64, seed=7)
    device, found = serve.device_at(0), []
    for tile in TILES:
        sizes = dict(zip(("block_m", "block_n", "num_warps"), tile, strict=True)) | {
            "num_stages": 2,
            "loads": "pointer",
        }
        spec = Specialization.parse("fwd-bf16-d64-dropout")
        config = family("portable_forward").default(spec, device).replace(**sizes)
        call = Call(q=q, k=k, v=v, causal=False, with_lse=True, features=features, config=config)
        out, lse = serve.prepare(call)(q, k, v, None, None, features)
        own = {**sizes, "block_n": 64, "block_m": min(tile[0], 64)}
        own |= {"dq_block_m": 64, "dq_block_n": tile[1]} if "split" in family_id else {}
        config = family(family_id).default(replace(spec, direction="backward"), device).replace(**own)
        run = serve.prepare(BackwardCall(forward=replace(call, config=config), out=out, dout=dout))
        found.append([out, lse, *run(dout, None, q, k, v, out, lse, None, None, features)[:3]])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one.float(), two.float(), atol=2e-2, rtol=2e-2)


PACKED = {"queries": (1, 300, 0, 128, 17, 513), "nheads": 8, "nheads_k": 2, "head_dim": 64, "poison": (1,)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences(deterministic: bool) -> None:
    given = {"causal": True, "dropout_p": P, "rng_state": state()}
    packed = make(Case(**PACKED, dtype=torch.bfloat16, options=given), device="cuda")  # type: ignore[arg-type]
    leaves = [x.requires_grad_() for x in (packed.q, packed.k, packed.v)]
    out, lse = flashgen.attention_varlen(*leaves, **packed.named, deterministic=deterministic, return_lse=True)
    assert_right(packed, out.detach(), lse.detach())
    dout = randn(*out.shape)
    found = dict(zip("qkv", torch.autograd.grad(out, leaves, dout), strict=True))
    assert_gradients(packed, found, gradients(packed, dout))


def test_the_generator_of_the_gpu_is_asked() -> None:
    leaves = qkv()

    def call() -> Tensor:
        return flashgen.attention(*leaves, dropout_p=0.5)

    torch.manual_seed(1)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=["cuda"]):
        assert torch.equal(call(), first)
    assert torch.equal(call(), first)
    again = checkpoint(lambda *given: flashgen.attention(*given, dropout_p=0.5), *leaves, use_reentrant=False)
    assert torch.equal(again, second)


def test_checkpoints_have_the_gradients_of_the_bits_that_they_drew() -> None:
    leaves = [leaf.requires_grad_() for leaf in qkv(dtype=torch.float32)]
    found = []
    for is_kept in (True, False):
        torch.manual_seed(5)
        run: Callable[..., Tensor] = lambda *x: flashgen.attention(*x, dropout_p=0.5, deterministic=True)  # noqa: E731
        out = run(*leaves) if is_kept else checkpoint(run, *leaves, use_reentrant=False)
        torch.rand(7, device="cuda")  # what else is drawn between the passes
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_every_replay_of_a_graph_draws_bits_of_its_own() -> None:
    leaves = [leaf.requires_grad_() for leaf in qkv()]
    value = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(2, 2, 64, 64).contiguous().requires_grad_()
    inputs = [leaves[0], leaves[1].detach()[:, :, :64].contiguous().requires_grad_(), value]

    def step() -> tuple[Tensor, Tensor]:
        out = flashgen.attention(*inputs, dropout_p=0.5, softmax_scale=0.01)
        return out, torch.autograd.grad(out.sum(), value)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # loads the kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    found = []
    for _ in range(3):
        graph.replay()
        found.append((out.clone(), dv.clone()))
    for (one, gradient), (other, _) in itertools.pairwise(found):
        assert not torch.equal(one, other)
        # dv of key j sums what the weights of j were, over heads and queries: the same bits in both passes
        kept = one.float().sum(2).unflatten(1, (2, 2)).sum(2)
        torch.testing.assert_close(gradient.float().mean(-1), kept, atol=0.5, rtol=2e-2)
    torch.manual_seed(2)
    graph.replay()
    first = out.clone()
    torch.manual_seed(2)
    graph.replay()
    assert torch.equal(out, first)


def test_torch_compile_trains_with_it() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashgen.attention(q, k, v, causal=True, dropout_p=P).float().square().mean()

    leaves = [leaf.requires_grad_() for leaf in qkv()]
    compiled = torch.compile(loss, fullgraph=True)
    values = torch.stack([compiled(*leaves).detach() for _ in range(8)])
    assert len(values.unique()) > 1
    plain = torch.stack([loss(*leaves).detach() for _ in range(8)])
    torch.testing.assert_close(values.mean(), plain.mean(), atol=0.0, rtol=0.05)
    compiled(*leaves).backward()
    assert all(bool(leaf.grad is not None and leaf.grad.isfinite().all()) for leaf in leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 203), (512, 256), (1023, 1024)])
def test_flash_attentions_checks(causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    """As its tests: the share of dropped weights, and twice the error of the same arithmetic in half precision."""
    q = randn(2, seqlen_q, 6, 64, dtype=torch.float16).requires_grad_()
    k, v = (randn(2, seqlen_k, 2, 64, dtype=torch.float16, seed=seed).requires_grad_() for seed in (1, 2))
    out, _, signed = flash_attn.flash_attn_func(q, k, v, P, causal=causal, return_attn_probs=True)
    signed = signed[:, :, :seqlen_q, :seqlen_k]
    place = torch.arange(seqlen_k, device="cuda") - torch.arange(seqlen_q, device="cuda")[:, None]
    seen = place <= seqlen_k - seqlen_q if causal else torch.ones_like(place, dtype=torch.bool)
    dropped = float((signed < 0).sum() / (seen.sum() * 12))
    assert abs(dropped - P) <= 0.01

    def plain(*given: Tensor) -> Tensor:
        one, two, three = (x.transpose(1, 2) for x in given)
        two, three = (x.repeat_interleave(3, 1) for x in (two, three))
        scores = (one @ (two / math.sqrt(64)).mT).masked_fill(~seen, -math.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        return ((weights * (signed >= 0)) @ (three * keep_scale(P))).transpose(1, 2)

    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    right, low = plain(*exact), plain(q, k, v)
    assert (out - right).abs().max() <= 2 * (low - right).abs().max() + 1e-5
    dout = randn(*out.shape, dtype=torch.float16, seed=4)
    found, half = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, low))
    for one, rough, other in zip(found, half, torch.autograd.grad(right, exact, dout.float()), strict=True):
        assert (one - other).abs().max() <= 3 * (rough - other).abs().max() + 1e-4
