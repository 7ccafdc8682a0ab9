"""Gradients of `flashgen.attention` in what torch trains with: checkpoints, compile, autocast, graphs, streams, ops."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.core.errors import LaunchError
from flashgen.core.settings import settings
from flashgen.runtime.autograd import ops as training_ops
from tests.gpu.streams import busy_stream
from tests.gpu.training_cases import FEATURES, SQ, B, D, H, Tensors, assert_gradients, dense_gradients, leaf, qkv

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh(generated_kernels: None) -> None:
    """Generated kernels only, nothing that torch.compile remembers, and the same inputs in whatever order tests run."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    def call(*inputs: torch.Tensor, **arguments: Any) -> Any:
        def run(*inner: torch.Tensor) -> Any:
            return flashgen.attention(*inner, **arguments)

        return checkpoint(run, *inputs, use_reentrant=use_reentrant)

    assert_gradients(qkv(), {"causal": True, "softcap": 3.0}, lse=True, call=call)


class Block(torch.nn.Module):
    """A layer of a transformer: one projection for q, k and v, learned sinks, a learned bias of positions, an MLP."""

    def __init__(self, rows: int, heads: int = 4, dim: int = 256) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            torch.nn.LayerNorm(dim),
            torch.nn.Linear(dim, 3 * dim),
            torch.nn.Linear(dim, dim),
        )
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(dim), torch.nn.Linear(dim, 2 * dim), torch.nn.GELU(), torch.nn.Linear(2 * dim, dim)
        )
        self.sinks = torch.nn.Parameter(torch.zeros(heads))
        self.bias = torch.nn.Parameter(torch.zeros(heads, rows, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        found = flashgen.attention(q, k, v, layout="bshd", causal=True, sinks=self.sinks, bias=self.bias)
        x = x + self.out(found.flatten(-2))
        return x + self.mlp(x)


def model_of(rows: int) -> torch.nn.Module:
    return torch.nn.Sequential(Block(rows), Block(rows)).cuda()


def gradients_of(model: torch.nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> Tensors:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        call(x).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses what torch deprecates
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_trains_a_transformer_in_one_graph(dynamic: bool) -> None:
    rows = 160
    model = model_of(rows)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    x = torch.randn(2, rows, 256, device="cuda")
    expected = gradients_of(model, model, x)
    found = gradients_of(model, compiled, x)
    assert len(found) == len(expected) == len(list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm() + 1e-6
    target, losses = torch.randn_like(x), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            loss = (compiled(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_does_for_sdpa(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        out = flashgen.attention(q, k, v.to(dtype), causal=True)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == dtype
    out.backward(dout := torch.randn_like(out))
    truth = dense_gradients([q, k, v], {"causal": True}, dout, None, torch.float64)
    for tensor, expected in zip((q, k, v), truth, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - expected).norm() < 0.02 * expected.norm()
    with torch.no_grad(), torch.autocast("cuda", dtype):
        assert flashgen.attention(q, k, v).dtype == dtype


# torch keeps the accumulators of the samples, which were made on another stream than the one it captures on
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_graphed_callables_train() -> None:
    rows = 128
    module = torch.nn.Linear(256, 256).cuda()

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = module

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = flashgen.attention(q, k, v, layout="bshd", causal=True, deterministic=True)
            return self.project(out.flatten(-2).float())

    sample = qkv(2, 4, 4, rows, rows, bshd=True)
    graphed = torch.cuda.make_graphed_callables(Attention(), tuple(sample))
    for _ in range(3):
        inputs = qkv(2, 4, 4, rows, rows, bshd=True)
        found = torch.autograd.grad(graphed(*inputs).square().sum(), inputs)
        expected = torch.autograd.grad(Attention()(*inputs).square().sum(), inputs)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def test_a_captured_step_is_replayed_after_inputs_change() -> None:
    inputs = qkv()
    dout = torch.randn(B, H, SQ, D, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(flashgen.attention(*inputs, deterministic=True), inputs, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(flashgen.attention(*inputs, deterministic=True), inputs, dout)
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*inputs, dout):
                tensor.normal_()
        graph.replay()
        expected = torch.autograd.grad(flashgen.attention(*inputs, deterministic=True), inputs, dout)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's, for the capture that is refused
def test_a_cold_backward_pass_during_capture_is_refused_and_warmup_makes_it_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = "b1-h2-s64-d48"
    inputs = qkv(1, 2, 2, 64, 64, 48)
    dout = torch.randn_like(inputs[0])
    flashgen.warmup([shape])
    out = flashgen.attention(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="warmup"), torch.cuda.graph(graph):
        # a backward pass runs on the stream of its forward pass, so that is captured as well
        torch.autograd.grad(flashgen.attention(*inputs), inputs, dout)
    torch.cuda.synchronize()
    flashgen.warmup([shape], training=True)
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    expected = torch.autograd.grad(out, inputs, dout)
    truth = dense_gradients(inputs, {}, dout, None, torch.float64)
    for one, other in zip(expected, truth, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


# once a process torch says that the accumulators of the inputs were made on the other stream
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_a_backward_pass_follows_the_stream_of_its_forward_pass() -> None:
    inputs = qkv(4, 16, 16, 1024, 1024, 128)
    with busy_stream():
        late = [x * 1 for x in inputs]
        out = flashgen.attention(*late, causal=True, deterministic=True)
        found = torch.autograd.grad(out.float().square().sum(), inputs)
    out = flashgen.attention(*inputs, causal=True, deterministic=True)
    expected = torch.autograd.grad(out.float().square().sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_threads_train_side_by_side() -> None:
    pairs = [qkv(1, 8, 4, 512, 512, 64) for _ in range(4)]

    def gradients(inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flashgen.attention(*inputs, deterministic=True).float().square().sum(), inputs)

    expected = [gradients(each) for each in pairs]
    torch.cuda.synchronize()

    def repeat(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [gradients(pairs[index]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(a, b) for each in found for a, b in zip(each, expected[index], strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_ops_have_the_same_gradients() -> None:
    arguments = FEATURES["everything"]()
    with torch.profiler.profile():
        assert_gradients(qkv(), arguments, lse=True)
    inputs = [x.detach() for x in qkv()]
    found = torch.func.grad(lambda *x: flashgen.attention(*x).float().square().sum(), argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(flashgen.attention(*leaves).float().square().sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def test_opcheck() -> None:
    q, k, v = qkv(1, 4, 2, 64, 100, 64)
    sinks, scores = leaf(4, dtype=torch.float32), leaf(4, 64, 100)
    arguments = (q, k, v, True, 0.125, False, None, None, None, None, 0.0, None, sinks, scores, None, True)
    torch.library.opcheck(training_ops.attention_train_op, arguments)
    q, k, v, sinks, scores = (x.detach() for x in (q, k, v, sinks, scores))
    out, lse = training_ops.attention_train_op(q, k, v, True)
    given = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, True, None, False, None, None)
    options = (None, None, 0.0, None, sinks, scores, None, True, True, True)
    torch.library.opcheck(
        training_ops.attention_backward_op, (*given, *options), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_trains_whichever_is_current() -> None:
    inputs = [x.detach().to("cuda:1").requires_grad_() for x in qkv()]
    out = flashgen.attention(*inputs, causal=True)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, dout)
    truth = dense_gradients(inputs, {"causal": True}, dout, None, torch.float64)
    for one, other in zip(found, truth, strict=True):
        assert one.device == torch.device("cuda", 1)
        assert (one - other).norm() < 0.02 * other.norm()
