"""Training as torch runs it: checkpoints, autocast, torch.compile, and what it asks of ops."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashgen
from flashgen.runtime.autograd import ops as training_ops
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.dense_attention import dense
from tests.runtime.training import FEATURES, SK, SQ, B, D, H, assert_gradients, double, leaf, mask, qkv
from tests.tiers import first

pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, emulated: EmulatedGpu) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool, **arguments: Any) -> Any:
        run = functools.partial(flashgen.attention, return_lse=True, **arguments)
        return checkpoint(run, q, k, v, use_reentrant=use_reentrant)

    constant = {"causal": True, "sinks": torch.zeros(H)}  # inputs beside the positional ones are closed over
    assert_gradients(qkv(), constant, lse=True, call=call)
    assert len(emulated.launched) == 2
    assert len(emulated.launched_backward) == 1


def test_a_selective_checkpoint_may_keep_attention(emulated: EmulatedGpu) -> None:
    keeps = functools.partial(create_selective_checkpoint_contexts, [torch.ops.flashgen.attention_train.default])
    inputs = qkv()

    def call(*given: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(*given, causal=True).tanh()

    out = checkpoint(call, *inputs, use_reentrant=False, context_fn=keeps)
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert len(emulated.launched) == 1, "the rest is computed again, attention is not"
    expected = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_training", [False, True])
def test_autocast_casts_as_torch_does_for_sdpa(is_training: bool, dtype: torch.dtype, emulated: EmulatedGpu) -> None:
    q, k, v = qkv(head_dim_v=D)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    v = v.detach().to(other).requires_grad_()
    sinks = leaf(H, dtype=other)
    with torch.autocast("cpu", dtype), torch.set_grad_enabled(is_training):
        out = flashgen.attention(q, k, v, sinks=sinks, bias=leaf(SQ, SK))
        flashgen.attention(q, k.detach(), v)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == dtype
    made = emulated.launched
    assert made[0].features.sinks.dtype == torch.float32
    assert made[0].features.bias.dtype == torch.float32
    if is_training:
        out.float().square().sum().backward()
        assert [x.grad.dtype for x in (q, k, v, sinks)] == [torch.float32, torch.float32, other, other]
        assert emulated.planned_backward[0][0].dtype == ("bf16" if dtype == torch.bfloat16 else "fp16")
        truth = [double(x) for x in (q, k, v)]
        dense(*truth, sinks=sinks.detach().double(), bias=leaf(SQ, SK).detach().double())[0].square().sum().backward()
        for one, other_one in zip((q, k, v), truth, strict=True):
            torch.testing.assert_close(one.grad.double(), other_one.grad, atol=0.1, rtol=0.1)
    with torch.autocast("cpu", dtype, enabled=False):
        assert flashgen.attention(q.detach(), k.detach(), k.detach()).dtype == torch.float32


@pytest.mark.parametrize("name", ["plain", "offset tensor", "sinks", "everything"])
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_that_a_collective_returns_are_waited_for(name: str, which: int, emulated: EmulatedGpu) -> None:
    """They have no address, as in the backward pass of a layer that tensor parallelism shards."""
    inputs, arguments = qkv(), FEATURES[name]()
    results = flashgen.attention(*inputs, **arguments, return_lse=True)
    given = [torch.ones_like(result) for result in results]
    expected = torch.autograd.grad(results, inputs, given, retain_graph=True)
    given[which] = AsyncCollectiveTensor(given[which])
    assert not given[which].data_ptr()
    for one, other in zip(torch.autograd.grad(results, inputs, given), expected, strict=True):
        torch.testing.assert_close(one, other)
    pointers = emulated.launched_backward[-1].pointers
    assert all(pointers[tensor] for tensor in ("dout", "dlse"))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the output, which torch itself asks for
@pytest.mark.parametrize("name", first(1, ["everything", "plain"]))
def test_compiled_autograd_sees_the_op(name: str, emulated: EmulatedGpu) -> None:
    """And traces no launch, which is Python that it would guard and compile again for each layer."""
    inputs, seen = qkv(), []

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    def loss() -> torch.Tensor:
        return flashgen.attention(*inputs, **FEATURES[name](), return_lse=True)[0].square().sum()

    expected = torch.autograd.grad(loss(), inputs)
    total = loss()
    with compiled_autograd._enable(torch.compile(backend=compiler)):
        total.backward()
    for one, other in zip(inputs, expected, strict=True):
        torch.testing.assert_close(one.grad, other)
    assert len(emulated.launched_backward) == 2
    assert "flashgen.attention_backward.default" in seen


class Block(torch.nn.Module):
    """A layer of a transformer with one projection for q, k and v, and learned sinks."""

    def __init__(self, heads: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.sinks = torch.nn.Parameter(torch.zeros(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        found = flashgen.attention(q, k, v, layout="bshd", causal=True, sinks=self.sinks)
        return x + self.out(found.flatten(-2))


@pytest.mark.parametrize("dynamic", first(1, [False, True]))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch._dynamo.config.patch(
    specialize_float=True
)  # else torch begins anew for each number: test_under_torch has calls for that
def test_torch_compile_trains_in_one_graph(dynamic: bool, emulated: EmulatedGpu) -> None:
    torch.manual_seed(0)
    model = Block() if dynamic else torch.nn.Sequential(Block(), Block())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (12, 9) if dynamic else (12,):
        x = torch.randn(2, rows, 32)
        model(x).square().sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        compiled(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    assert len(emulated.launched_backward) == 4


def test_torch_compile_with_everything_at_once() -> None:
    def call(*inputs: torch.Tensor, **arguments: Any) -> Any:
        return torch.compile(flashgen.attention, fullgraph=True, backend="aot_eager")(*inputs, **arguments)

    assert_gradients(qkv(), FEATURES["everything"](), lse=True, call=call)


def test_torch_compile_under_autocast_and_with_checkpoints() -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            inner = checkpoint(flashgen.attention, q * 2, k, v, use_reentrant=False)
            return flashgen.attention(inner, k, v, causal=True).float()

    inputs = qkv(head_dim_v=D)
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        out = call(*inputs)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.05 * other.norm()  # gradients are summed before or after rounding to bf16


@pytest.mark.parametrize("bshd", first(1, [False, True]))
def test_the_ops_keep_what_torch_asks_of_ops(bshd: bool) -> None:
    q, k, v = qkv(bshd)
    tensors = (torch.ones(H), leaf(H), leaf(H, SQ, SK), mask(SQ, SK))
    arguments = (q, k, v, True, 0.3, bshd, 2, None, 3, None, 2.0, *tensors)
    torch.library.opcheck(training_ops.attention_train_op, (q, k, v, False, None, True) if bshd else arguments)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = training_ops.attention_train_op(q, k, v, bshd=bshd)
    checks = ("test_schema", "test_faketensor")  # it has no derivative to check
    given = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    torch.library.opcheck(training_ops.attention_backward_op, (*given, False, None, bshd), test_utils=checks)
    for one_bias in (leaf(H, SQ, SK), leaf(SQ, SK).mT.contiguous().mT, leaf(B, 1, 1, SK), leaf(SQ, 1), leaf(1, SK)):
        tensors = (None, leaf(H).detach(), one_bias.detach(), None)
        options = (False, None, bshd, None, None, None, None, 0.0, *tensors, False, True, True)
        torch.library.opcheck(training_ops.attention_backward_op, (*given, *options), test_utils=checks)
