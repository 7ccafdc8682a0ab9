"""Gradients of `flashgen.attention` on a GPU: all features against float64, and everything that torch trains with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError, UnsupportedError
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.runtime.autograd import ops as training_ops
from flashgen.runtime.ops import serve
from tests.gpu.public import compile_ahead
from tests.runtime.dense_attention import dense

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
B, H, HK, SQ, SK, D = 2, 4, 2, 203, 331, 64
FEW_KEYS = 16

Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generated kernels only, and nothing remembered from another test's database."""
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    flashgen.reload()


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def qkv(
    batch: int = B,
    nheads: int = H,
    nheads_k: int = HK,
    seqlen_q: int = SQ,
    seqlen_k: int = SK,
    head_dim: int = D,
    head_dim_v: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bshd: bool = False,
) -> Tensors:
    sizes = [(nheads, seqlen_q, head_dim), (nheads_k, seqlen_k, head_dim), (nheads_k, seqlen_k, head_dim_v or head_dim)]
    return [leaf(batch, s, h, d, dtype=dtype) if bshd else leaf(batch, h, s, d, dtype=dtype) for h, s, d in sizes]


def leaves_of(inputs: Tensors, arguments: dict[str, Any]) -> Tensors:
    return [x for x in (*inputs, *arguments.values()) if isinstance(x, torch.Tensor) and x.requires_grad]


def copied(value: Any, dtype: torch.dtype) -> Any:
    """A leaf of its own in another dtype, of floating-point tensors."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def dense_gradients(
    inputs: Tensors, arguments: dict[str, Any], dout: torch.Tensor, dlse: torch.Tensor | None, dtype: torch.dtype
) -> Tensors:
    """What torch finds in a dtype through a matrix of all scores."""
    inputs = [copied(x, dtype) for x in inputs]
    arguments = {name: copied(value, dtype) for name, value in arguments.items()}
    out, lse = dense(*inputs, **arguments)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * dlse.to(dtype)).sum()
    return list(torch.autograd.grad(loss, leaves_of(inputs, arguments)))


def assert_gradients(
    inputs: Tensors, arguments: dict[str, Any], *, lse: bool = False, call: Callable[..., Any] | None = None
) -> Tensors:
    """Every gradient is at most three times as far from float64 as torch's own in the same dtype; returns them."""
    leaves, dtype = leaves_of(inputs, arguments), inputs[0].dtype
    for tensor in leaves:
        tensor.grad = None
    out, sums = (call or flashgen.attention)(*inputs, **arguments, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(sums) if lse else None
    if dlse is None:
        out.backward(dout)
    else:
        dlse = torch.where(sums.isfinite(), dlse, 0.0)
        torch.autograd.backward((out, sums), (dout, dlse))
    truth = dense_gradients(inputs, arguments, dout, dlse, torch.float64)
    eager = dense_gradients(inputs, arguments, dout, dlse, dtype)
    for tensor, expected, plain in zip(leaves, truth, eager, strict=True):
        found = tensor.grad
        assert found is not None
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert found.isfinite().all()
        error, allowed = (found.double() - expected).abs(), (plain.double() - expected).abs()
        ulp = 2 * torch.finfo(found.dtype).eps * expected.abs().max()
        assert error.max() <= 3 * allowed.max() + ulp
        # beside few keys all cancels: eager's softmax is exact there, and a kernel starts from a rounded output
        floor = ulp / 64 if inputs[1].shape[2] > FEW_KEYS else 2 * ulp
        assert error.mean() <= 1.5 * allowed.mean() + floor
    return [x.grad for x in leaves if x.grad is not None]


def bias(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {"bias": leaf(*shape, dtype=dtype)}


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") < 0.7


def slopes() -> torch.Tensor:
    return torch.linspace(0.05, 0.5, H, device="cuda")


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"softmax_scale": 0.3},
    "causal": lambda: {"causal": True},
    "offset": lambda: {"causal": True, "q_offset": -40},
    "offset tensor": lambda: {"causal": True, "q_offset": torch.tensor([20, -30], device="cuda", dtype=torch.int32)},
    "window": lambda: {"window": (50, 10)},
    "causal window": lambda: {"causal": True, "window": (70, None)},
    "softcap": lambda: {"softcap": 2.0},
    "alibi": lambda: {"alibi_slopes": slopes()},
    "sinks": lambda: {"sinks": leaf(H, dtype=torch.float32)},
    "sinks in bf16": lambda: {"sinks": leaf(H), "causal": True, "q_offset": -40},
    "bias": lambda: bias(B, H, SQ, SK),
    "bias of heads": lambda: bias(H, SQ, SK),
    "bias of a batch in fp32": lambda: bias(B, 1, SQ, SK, dtype=torch.float32),
    "bias of keys": lambda: bias(B, 1, 1, SK),
    "bias of rows": lambda: {**bias(SQ, 1), "sinks": leaf(H, dtype=torch.float32)},
    "expanded bias": lambda: {"bias": leaf(H, 1, 336).detach()[..., :SK].expand(B, H, SQ, SK).requires_grad_()},
    "constant bias": lambda: {"bias": leaf(H, SQ, SK).detach()},
    "mask": lambda: {"mask": mask(B, 1, SQ, SK)},
    "mask of keys": lambda: {"mask": mask(B, 1, 1, SK), "causal": True},
    "rows without a key": lambda: {"mask": mask(B, H, SQ, 1), **bias(H, SQ, SK)},
    "everything": lambda: {
        "causal": True,
        "q_offset": 150,
        "window": (190, None),
        "softmax_scale": 0.2,
        "softcap": 10.0,
        "alibi_slopes": slopes(),
        "sinks": leaf(H, dtype=torch.float32),
        "mask": mask(H, SQ, SK),
        **bias(B, 1, SQ, SK),
    },
}
UNEXPLAINED = ("return_lse", "softmax_scale")


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead() -> None:
    """The kernels of all features in both directions, in as many processes as there are cores."""
    compile_ahead(served_pairs(), serve.device_at(0))


def served_pairs() -> Iterator[tuple[Specialization, Config]]:
    for make, fixed in itertools.product(FEATURES.values(), (False, True)):
        arguments = {name: value for name, value in make().items() if name not in UNEXPLAINED}
        for direction in ("forward", "backward"):
            shown = flashgen.explain(*qkv(), **arguments, direction=direction, deterministic=fixed)
            yield shown.specialization, shown.served.config


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_of_every_feature(name: str, deterministic: bool) -> None:
    for layout in ("bhsd", "bshd"):
        arguments = {**FEATURES[name](), "layout": layout, "deterministic": deterministic}
        assert_gradients(qkv(bshd=layout == "bshd"), arguments, lse=layout == "bshd")


@pytest.mark.parametrize("head_dim", [16, 32, 72, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_head_dimensions(head_dim: int, causal: bool) -> None:
    assert_gradients(qkv(head_dim=head_dim), {"causal": causal})


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_dtypes(dtype: str) -> None:
    for head_dim in (64, 128):
        assert_gradients(qkv(head_dim=head_dim, dtype=DTYPES[dtype]), {"causal": True})


def test_gradients_of_unequal_head_dimensions() -> None:
    assert_gradients(qkv(head_dim=192, head_dim_v=128), {"causal": True})


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2), (3, 6, 2, 1, 500), (1, 8, 1, 700, 64), (2, 2, 2, 128, 128), (1, 3, 3, 1025, 1023)]
)
def test_gradients_of_shapes(shape: tuple[int, ...]) -> None:
    for causal, head_dim in itertools.product((False, True), (64, 128)):
        assert_gradients(qkv(*shape, head_dim=head_dim), {"causal": causal})


def test_one_key_leaves_nothing_to_choose() -> None:
    q, k, v = qkv(seqlen_k=1)
    out = flashgen.attention(q, k, v)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert dq.abs().max() < 0.05
    assert dk.abs().max() < 0.05 * SQ
    expected = dout.double().sum(2, keepdim=True).unflatten(1, (HK, -1)).sum(2)
    torch.testing.assert_close(dv.double(), expected, atol=0.02, rtol=0.02)


def test_strides_that_no_descriptor_takes() -> None:
    base = leaf(B, 200, 3, H, 65)
    q, k, v = (base[:, :, i, :, 1:].transpose(1, 2) for i in range(3))
    out = flashgen.attention(q, k, v, causal=True)
    out.backward(dout := torch.randn_like(out))
    found = base.grad
    assert found is not None
    copies = [x.detach().requires_grad_() for x in (q, k, v)]
    truth = dense_gradients(copies, {"causal": True}, dout, None, torch.float64)
    for i, expected in enumerate(truth):
        torch.testing.assert_close(found[:, :, i, :, 1:].transpose(1, 2).double(), expected, atol=0.05, rtol=0.05)
    assert not found[..., 0].any()


def test_views_of_one_projection() -> None:
    packed = leaf(B, 200, 3, H, D)
    flashgen.attention(*packed.unbind(2), layout="bshd", causal=True).float().square().sum().backward()
    found, packed.grad = packed.grad, None
    dense(*(x.transpose(1, 2).double() for x in packed.unbind(2)), causal=True)[0].square().sum().backward()
    torch.testing.assert_close(found, packed.grad, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("which", range(1, 32))
def test_any_subset_of_inputs_may_require_gradients(which: int) -> None:
    inputs, arguments = qkv(), {"sinks": leaf(H, dtype=torch.float32), **bias(H, SQ, SK)}
    for number, tensor in enumerate([*inputs, *arguments.values()]):
        tensor.requires_grad_(bool(which >> number & 1))
    assert_gradients(inputs, arguments)


DOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded from one": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "expanded over heads": lambda x: x[:, :1].expand_as(x),
    "expanded over rows": lambda x: x[:, :, :1].expand_as(x),
    "other order": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension apart": lambda x: x.mT.contiguous().mT,
    "unaligned": lambda x: torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]],
    "padded": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("name", DOUTS)
def test_gradients_of_any_strides(name: str) -> None:
    inputs = qkv()
    out = flashgen.attention(*inputs, causal=True, deterministic=True)
    given = DOUTS[name](torch.randn_like(out))
    found = torch.autograd.grad(out, inputs, given, retain_graph=True)
    expected = torch.autograd.grad(out, inputs, given.contiguous())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_to_attend_to() -> None:
    for batch, rows, keys in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        inputs, sinks = qkv(batch=batch, seqlen_q=rows, seqlen_k=keys), leaf(H, dtype=torch.float32)
        out, lse = flashgen.attention(*inputs, sinks=sinks, return_lse=True)
        (out.float().sum() + lse.sum()).backward()
        assert all(x.grad is not None and not x.grad.any() for x in inputs)
        assert sinks.grad is not None
        assert sinks.grad.tolist() == [batch * rows if keys == 0 else 0.0] * H


@pytest.mark.parametrize("name", ["plain", "causal", "everything", "bias of keys", "bias"])
def test_the_same_bits_in_a_hundred_repeats(name: str) -> None:
    arguments = {**FEATURES[name](), "deterministic": True}
    inputs = qkv(nheads=8, nheads_k=4) if name in ("plain", "causal") else qkv()
    leaves = leaves_of(inputs, arguments)
    out = flashgen.attention(*inputs, **arguments)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_torch_s_switch_makes_it_deterministic() -> None:
    inputs = qkv(nheads_k=4, seqlen_q=1024, seqlen_k=1024)
    torch.use_deterministic_algorithms(True)
    try:
        grads = [torch.autograd.grad(flashgen.attention(*inputs).float().square().sum(), inputs) for _ in range(20)]
        shown = flashgen.explain(*inputs, direction="backward")
    finally:
        torch.use_deterministic_algorithms(False)
    assert shown.workload.deterministic
    assert all(torch.equal(one, other) for each in grads for one, other in zip(grads[0], each, strict=True))


def peak_bytes(seqlen: int) -> int:
    """The most memory of a forward and backward pass, beyond the inputs."""
    inputs = qkv(1, 8, 8, seqlen, seqlen, 128)
    dout = torch.randn_like(inputs[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flashgen.attention(*inputs, causal=True).backward(dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    peak_bytes(512)  # what the first launches of a process leave
    short, long = peak_bytes(16384), peak_bytes(32768)
    assert long < 2.1 * short
    tensor = 8 * 32768 * 128 * 2
    # out, dq, dk, dv, and dq in fp32; a matrix of the scores of one head alone would be 32 of these
    assert long < 7.5 * tensor


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
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            big = big @ big
        late = [x * 1 for x in inputs]
        out = flashgen.attention(*late, causal=True, deterministic=True)
        found = torch.autograd.grad(out.float().square().sum(), inputs)
    torch.cuda.current_stream().wait_stream(side)
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


def test_what_has_no_gradient_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match="alibi_slopes have no gradient"):
        flashgen.attention(q, k, v, alibi_slopes=slopes().requires_grad_())
    (dq,) = torch.autograd.grad(flashgen.attention(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        dq.float().sum().backward()
    with pytest.raises(UnsupportedError, match="no kernel family serves"):
        flashgen.attention(*qkv(head_dim=520))


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
