"""Gradients through the public call on an emulated GPU: every feature against torch's own, and all around it."""

from __future__ import annotations

import functools
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashgen
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import BlockMask
from flashgen.runtime.autograd import ops as training_ops
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.dense_attention import dense
from tests.tiers import first

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 10, 13, 16, 24

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def qkv(bshd: bool = False, dtype: torch.dtype = torch.float32, head_dim_v: int = DV) -> list[torch.Tensor]:
    shapes = [(B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, head_dim_v)]
    if bshd:
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    return [leaf(*shape, dtype=dtype, seed=number) for number, shape in enumerate(shapes)]


def double(value: Any) -> Any:
    """A leaf of its own in float64, with the same strides."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def assert_gradients(
    inputs: list[torch.Tensor], arguments: dict[str, Any], *, lse: bool = False, call: Callable[..., Any] | None = None
) -> None:
    """The output, the LSE and every gradient are those that torch finds in float64."""
    given = [*inputs, *arguments.values()]
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    truth_inputs, truth_arguments = [double(x) for x in inputs], {n: double(x) for n, x in arguments.items()}
    truth_leaves = [
        x for x in [*truth_inputs, *truth_arguments.values()] if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    out, sums = (call or flashgen.attention)(*inputs, **arguments, return_lse=True)
    true_out, true_sums = dense(*truth_inputs, **truth_arguments)
    torch.testing.assert_close(out.double(), true_out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sums.double(), true_sums, atol=1e-5, rtol=1e-4)
    dout, dsums = torch.randn_like(out), torch.randn_like(sums)
    finite = torch.where(true_sums.isfinite(), true_sums, 0.0)
    losses = [(out * dout).sum(), (true_out * dout.double()).sum()]
    if lse:
        losses[0] = losses[0] + (torch.where(true_sums.isfinite(), sums, 0.0) * dsums).sum()
        losses[1] = losses[1] + (finite * dsums.double()).sum()
    holders = [x if x.is_leaf else x.retain_grad() or x for x in leaves]  # type: ignore[func-returns-value]
    losses[0].backward()
    found = [x.grad for x in holders]
    expected = torch.autograd.grad(losses[1], truth_leaves)
    for tensor, one, other in zip(leaves, found, expected, strict=True):
        assert (one.shape, one.dtype) == (tensor.shape, tensor.dtype)
        rtol = 1e-4 if one.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=rtol)
    for tensor in leaves:
        tensor.grad = None


def bias(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"bias": leaf(*shape, dtype=dtype)}


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"softmax_scale": 0.3},
    "causal": lambda: {"causal": True},
    "offset": lambda: {"causal": True, "q_offset": -4},
    "offset tensor": lambda: {"causal": True, "q_offset": torch.tensor([2, -3], dtype=torch.int32)},
    "window": lambda: {"window": (3, 1)},
    "causal window": lambda: {"causal": True, "window": (2, None)},
    "softcap": lambda: {"softcap": 0.7},
    "alibi": lambda: {"alibi_slopes": torch.linspace(0.1, 1, H)},
    "alibi of sequences": lambda: {"alibi_slopes": torch.linspace(0.1, 1, B * H).view(B, H), "q_offset": 3},
    "sinks": lambda: {"sinks": leaf(H)},
    "sinks alone": lambda: {"sinks": leaf(H), "causal": True, "q_offset": -4},
    "strided sinks": lambda: {"sinks": leaf(2 * H)[::2]},
    "bias": lambda: bias(B, H, SQ, SK),
    "bias of heads": lambda: bias(H, SQ, SK),
    "bias of scores": lambda: bias(SQ, SK),
    "bias of a batch": lambda: bias(B, 1, SQ, SK),
    "bias of keys": lambda: bias(SK),
    "bias of sequences' keys": lambda: bias(B, 1, 1, SK),
    "bias of rows": lambda: bias(SQ, 1),
    "bias of heads' rows, with sinks": lambda: {**bias(H, SQ, 1), "sinks": leaf(H), "causal": True, "q_offset": -4},
    "bias of one": lambda: {**bias(1), "sinks": leaf(H)},
    "bias of nothing": bias,
    "expanded bias": lambda: {"bias": leaf(H, 1, SK).expand(B, H, SQ, SK)},
    "bias expanded along keys": lambda: {"bias": leaf(SQ, 1).expand(H, SQ, SK)},
    "transposed bias": lambda: {"bias": leaf(SK, SQ).mT},
    "bias in bf16": lambda: bias(H, SQ, SK, dtype=torch.bfloat16),
    "bias of keys in fp16": lambda: bias(B, 1, 1, SK, dtype=torch.float16),
    "constant bias": lambda: {"bias": leaf(H, SQ, SK).detach(), "sinks": leaf(H)},
    "softcap and bias": lambda: {"softcap": 0.5, **bias(H, SQ, SK), "causal": True},
    "mask": lambda: {"mask": mask(B, 1, SQ, SK)},
    "mask of keys": lambda: {"mask": mask(B, 1, 1, SK)},
    "rows without a key": lambda: {"mask": mask(B, H, SQ, 1), **bias(H, SQ, SK)},
    "everything": lambda: {
        "causal": True,
        "q_offset": 4,
        "window": (9, None),
        "softmax_scale": 0.4,
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 1, H),
        "sinks": leaf(H),
        "mask": mask(H, SQ, SK),
        **bias(B, 1, SQ, SK),
    },
}


@pytest.mark.parametrize("layout", first(1, ["bhsd", "bshd"]))
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_those_of_torch(name: str, layout: str, emulated: EmulatedGpu) -> None:
    arguments = {**FEATURES[name](), "layout": layout}
    for lse in (False, True):
        assert_gradients(qkv(layout == "bshd"), arguments, lse=lse)
    assert len(emulated.launched_backward) == 2
    assert len(emulated.planned_backward) == 1, "whether the LSE has a gradient chooses no code"
    assert [spec.direction for spec, _ in emulated.compiled] == ["forward", "backward"]


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of flashgen's ops that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flashgen":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "offset tensor", "sinks", "bias of rows", "everything"])
def test_the_ops_have_the_same_gradients(name: str) -> None:
    for layout in ("bhsd", "bshd"):
        with Seen() as seen:
            assert_gradients(qkv(layout == "bshd"), {**FEATURES[name](), "layout": layout}, lse=True)
        assert seen.names == ["attention_train", "attention_backward"]


@pytest.mark.parametrize("name", ["plain", "offset tensor", "everything"])
def test_a_plain_call_saves_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.runtime.autograd.training.attention_train_op", None)
    monkeypatch.setattr("flashgen.runtime.autograd.functions.attention_backward_op", None)
    for lse in (False, True):
        assert_gradients(qkv(), FEATURES[name](), lse=lse)


def test_who_asks_for_no_gradient_gets_a_forward_pass_without_one(emulated: EmulatedGpu) -> None:
    q, k, v = qkv()
    with torch.no_grad():
        assert not flashgen.attention(q, k, v).requires_grad
    assert not flashgen.attention(q.detach(), k.detach(), v.detach()).requires_grad
    assert [done.lse for done in emulated.launched] == [None, None]
    assert flashgen.attention(q, k.detach(), v.detach()).requires_grad
    assert flashgen.attention(q.detach(), k.detach(), v.detach(), sinks=leaf(H)).requires_grad


@pytest.mark.parametrize("which", range(1, 32))
def test_any_subset_of_inputs_may_require_gradients(which: int) -> None:
    inputs = qkv()
    arguments = {"sinks": leaf(H), "bias": leaf(H, SQ, SK)}
    for number, tensor in enumerate([*inputs, *arguments.values()]):
        tensor.requires_grad_(bool(which >> number & 1))
    assert_gradients(inputs, arguments)


def test_the_lse_alone_may_have_a_gradient() -> None:
    q, k, v = qkv()
    _, lse = flashgen.attention(q, k, v, sinks=torch.zeros(H), return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    truth = [double(x) for x in (q, k, v)]
    expected = torch.autograd.grad(dense(*truth, sinks=torch.zeros(H))[1].sum(), truth[:2])
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    assert not found[2].any()


DOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "contiguous": (torch.clone, False),
    "expanded from one": (lambda x: x[:1, :1, :1, :1].expand_as(x), True),
    "expanded over heads": (lambda x: x[:, :1].expand_as(x), False),
    "expanded over rows": (lambda x: x[:, :, :1].expand_as(x), False),
    "other order": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), False),
    "last dimension apart": (lambda x: x.mT.contiguous().mT, True),
    "unaligned": (lambda x: torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]], True),
    "padded": (lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]], False),
}


@pytest.mark.parametrize("name", DOUTS)
def test_a_gradient_of_any_strides_is_copied_only_if_it_must_be(name: str, emulated: EmulatedGpu) -> None:
    make, is_copied = DOUTS[name]
    q, k, v = qkv()
    out = flashgen.attention(q, k, v)
    given = make(torch.randn_like(out))
    found = torch.autograd.grad(out, (q, k, v), given)
    truth = [double(x) for x in (q, k, v)]
    expected = torch.autograd.grad(dense(*truth)[0], truth, given.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    assert (emulated.launched_backward[0].pointers["dout"] != given.data_ptr()) is is_copied
    assert emulated.planned_backward[0][0].aligned16, "one odd gradient does not cost the fast kernels"


def test_an_unaligned_call_copies_nothing(emulated: EmulatedGpu) -> None:
    q, k, v = (torch.cat([x, x[..., :1]], -1)[..., :-1].detach().requires_grad_() for x in qkv(head_dim_v=D))
    out = flashgen.attention(q, k, v)
    given = torch.randn(B, H, SQ, D + 1)[..., 1:]
    out.backward(given)
    assert emulated.launched_backward[0].pointers["dout"] == given.data_ptr()
    assert not emulated.planned_backward[0][0].aligned16


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_views_of_one_projection_get_dense_gradients(layout: str) -> None:
    packed = leaf(B, SQ, 3, H, D)
    seen: list[torch.Tensor] = []
    inputs = [x if layout == "bshd" else x.transpose(1, 2) for x in packed.unbind(2)]
    for tensor in inputs:
        tensor.register_hook(seen.append)
    flashgen.attention(*inputs, layout=layout, causal=True).square().sum().backward()
    truth = double(packed)
    views = [x.transpose(1, 2) for x in truth.unbind(2)]
    dense(*views, causal=True)[0].square().sum().backward()
    torch.testing.assert_close(packed.grad.double(), truth.grad, atol=1e-5, rtol=1e-4)
    assert [(x if layout == "bshd" else x.transpose(1, 2)).is_contiguous() for x in seen] == [True] * 3


def test_a_leaf_takes_its_gradient_without_a_copy(emulated: EmulatedGpu) -> None:
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv()]
    flashgen.attention(*tensors).square().sum().backward()
    for tensor, name in zip(tensors, ("dq", "dk", "dv"), strict=True):
        assert tensor.grad is not None
        assert tensor.grad.data_ptr() == emulated.launched_backward[0].pointers[name]
        assert tensor.grad.stride() == tensor.stride()


def test_an_expanded_key_gets_the_sum_of_its_gradients() -> None:
    q, _, _ = qkv()
    k, v = leaf(B, 1, SK, D), leaf(B, 1, SK, D)
    arguments = {"causal": True}
    assert_gradients([q, k.expand(B, H, SK, D), v.expand(B, H, SK, D)], arguments)
    flashgen.attention(q, k.expand(B, H, SK, D), v.expand(B, H, SK, D)).sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize(("shape", "keys"), [((0, 2, 5, 16), 5), ((2, 2, 0, 16), 5), ((2, 2, 5, 16), 0)])
def test_nothing_to_attend_to_has_gradients_of_zero(
    shape: tuple[int, ...], keys: int, emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.launch.plan import EmptyBackwardPlan, EmptyPlan

    monkeypatch.setattr("flashgen.launch.plan.make_plan", lambda *_: EmptyPlan())
    monkeypatch.setattr("flashgen.launch.plan.make_backward_plan", lambda *_: EmptyBackwardPlan())
    q, k, v = leaf(*shape), leaf(shape[0], 2, keys, 16), leaf(shape[0], 2, keys, 16)
    extra = {"sinks": leaf(2), "bias": leaf(2, shape[2], keys)}
    out, lse = flashgen.attention(q, k, v, **extra, return_lse=True)
    (out.sum() + lse.sum()).backward()
    for tensor in (q, k, v, extra["bias"]):
        assert tensor.grad is not None
        assert not tensor.grad.any()
    expected = shape[0] * shape[2] if keys == 0 else 0.0
    assert extra["sinks"].grad.tolist() == [expected, expected], "without keys the LSE is the sink"


def test_gradients_accumulate_and_a_graph_may_be_kept() -> None:
    q, k, v = qkv()
    out = flashgen.attention(q, k, v)
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(q.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_a_changed_input_is_noticed() -> None:
    q, k, v = qkv()
    out = flashgen.attention(q * 1, k, v, mask=(changed := mask(SQ, SK)))
    changed.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_second_derivative_is_refused_with_the_rule(is_seen: bool) -> None:
    q, k, v = qkv()
    with Seen() if is_seen else warnings.catch_warnings():
        out = flashgen.attention(q, k, v)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(UnsupportedError, match="first derivatives only, and a gradient of its gradient"):
            dq.sum().backward()


def test_what_has_no_gradient_is_refused_where_one_is_asked_for(emulated: EmulatedGpu) -> None:
    q, k, v = qkv()
    constant = [x.detach() for x in (q, k, v)]
    slopes = leaf(H)
    for inputs in ((q, k, v), constant):
        with pytest.raises(
            UnsupportedError, match=r"alibi_slopes have no gradient here, and these require one; detach"
        ):
            flashgen.attention(*inputs, alibi_slopes=slopes)
    with pytest.raises(UnsupportedError, match=r"no gradient through tl.sin of .*line 2 .*'return tl.sin\(score\)'"):
        flashgen.attention(q, k, v, score_mod=rolled)
    with pytest.raises(UnsupportedError, match=r"no gradient through tl\.sin"):
        flashgen.attention(*constant, score_mod=rolled, bias=leaf(SQ, SK))
    with pytest.raises(UnsupportedError, match=r"functions of the caller load from have no gradient.* got aux\[1\]"):
        flashgen.attention(*constant, mask_mod=of_table, aux=(torch.zeros(3), leaf(3)))
    assert emulated.launched == []
    with torch.no_grad():
        flashgen.attention(*constant, alibi_slopes=slopes)


def of_table(b, h, q_idx, k_idx, ends, unused):  # type: ignore[no-untyped-def]
    return k_idx <= tl.load(ends + q_idx)


@pytest.mark.parametrize("how", ["eager", "compiled", "transformed", "checkpoint"])
def test_gradients_flow_around_what_a_function_hides(how: str) -> None:
    ends = torch.arange(SQ, dtype=torch.int32) % 5 * 3
    mask = torch.arange(SK) <= ends[:, None]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, return_lse: bool) -> Any:
        return flashgen.attention(q, k, v, mask_mod=of_table, aux=(ends, ends), return_lse=return_lse)

    if how == "transformed":
        inputs = qkv()
        found = torch.func.grad(lambda *one: call(*one, None, True)[0].sum(), (0, 1, 2))(*inputs)
        out, _ = call(*inputs, None, True)
        for one, other in zip(found, torch.autograd.grad(out.sum(), inputs), strict=True):
            torch.testing.assert_close(one, other)
        return
    asked = {
        "eager": call,
        "compiled": torch.compile(call, backend="aot_eager", fullgraph=True),
        "checkpoint": functools.partial(checkpoint, call, use_reentrant=False),
    }[how]
    assert_gradients(qkv(), {"mask": mask}, lse=True, call=asked)


def test_a_changed_table_is_noticed() -> None:
    q, k, v = qkv()
    ends = torch.full((SQ,), 5, dtype=torch.int32)
    out = flashgen.attention(q * 1, k, v, mask_mod=of_table, aux=(ends, ends))
    ends.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_block_mask_that_trains_has_lists_both_ways() -> None:
    lists = {"counts": torch.ones(1, 1, 1, dtype=torch.int32), "indices": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}
    forward = {f"{kind}_{name}": one for kind in ("partial", "full") for name, one in lists.items()}
    blocks = BlockMask(**forward, seqlen_q=SQ, seqlen_k=SK)
    ends = torch.zeros(SQ, dtype=torch.int32)
    with pytest.raises(
        WorkloadError, match=r"a block mask that trains also lists .*q_partial_counts.* got one without"
    ):
        flashgen.attention(*qkv(), mask_mod=of_table, aux=(ends, ends), block_mask=blocks)


def rolled(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return tl.sin(score)


# --- what torch does around ----------------------------------------------------------------------------------------


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
)  # else torch begins anew for each number: test_api has calls for that
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


STRIDES: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.empty(2, 6, 10, 16),
    "transposed": lambda: torch.empty(2, 10, 6, 16).transpose(1, 2),
    "packed": lambda: torch.empty(2, 10, 3, 6, 16)[:, :, 1].transpose(1, 2),
    "rows first": lambda: torch.empty(10, 2, 6, 16).permute(1, 2, 0, 3),
    "padded": lambda: torch.empty(2, 6, 10, 17)[..., 1:],
    "expanded heads": lambda: torch.empty(2, 1, 10, 16).expand(2, 6, 10, 16),
    "expanded rows": lambda: torch.empty(2, 6, 1, 16).expand(2, 6, 10, 16),
    "expanded batch": lambda: torch.empty(1, 6, 10, 16).expand(2, 6, 10, 16),
    "one head": lambda: torch.empty(2, 10, 1, 16).transpose(1, 2),
}


@pytest.mark.parametrize("name", STRIDES)
def test_a_gradient_is_dense_in_the_order_of_its_tensor(name: str) -> None:
    from flashgen.runtime.ops.gradients import empty_gradient

    tensor = STRIDES[name]()
    found = empty_gradient(tensor)
    assert found.shape == tensor.shape
    assert found.stride(3) == 1
    order = sorted(range(4), key=found.stride, reverse=True)
    assert found.permute(order).is_contiguous()
    with torch._subclasses.FakeTensorMode():
        assert empty_gradient(STRIDES[name]()).stride() == found.stride()


def test_transforms_of_functions() -> None:
    q, k, v = (x.detach() for x in qkv())

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, k, v, causal=True).square().sum()

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    for one, other in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected, strict=True):
        torch.testing.assert_close(one, other)
    (second,) = torch.func.vjp(lambda q: torch.func.grad(loss)(q, k, v), q)[1:]
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        second(q)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where forward-mode derivatives begin
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            torch.func.jvp(loss, (q, k, v), (q, k, v))
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            torch.func.hessian(loss)(q, k, v)


def attends(x: torch.Tensor) -> Any:
    return flashgen.attention(x, x, x)


def attends_in_a_window(x: torch.Tensor) -> Any:
    return flashgen.attention(x, x, x, window=(1, 0))


def attends_with_a_bias(x: torch.Tensor) -> Any:
    plain = torch.ones(B, H, SQ, SQ)
    return flashgen.attention(plain, plain, plain, bias=x)


def attends_packed(x: torch.Tensor) -> Any:
    return flashgen.attention_varlen(x[0], x[0], x[0], torch.tensor([0, 2], dtype=torch.int32), max_seqlen_q=2)


def merges(x: torch.Tensor) -> Any:
    return flashgen.merge_states([x, x], [torch.ones(B, H, SQ)] * 2)


CALLS = (attends, attends_in_a_window, attends_with_a_bias, attends_packed, merges)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where forward-mode derivatives begin
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("autograd", [True, False])
def test_forward_mode_derivatives_are_refused(call: Callable[[torch.Tensor], Any], autograd: bool) -> None:
    """Kernels know no tangents: without a word, every derivative would be 0."""
    x = torch.ones(B, H, SQ, SQ)
    with torch.set_grad_enabled(autograd):
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            torch.func.jvp(call, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            call(forward_ad.make_dual(x, x))


def test_dual_numbers_beside_a_call_do_not_matter() -> None:
    x = torch.ones(B, H, SQ, D)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        torch.testing.assert_close(attends(x), attends(forward_ad.unpack_dual(dual).primal))


def test_vmap_under_and_over_gradients() -> None:
    stacks = [torch.stack([x.detach(), 2 * x.detach()]) for x in qkv()]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, k, v, sinks=torch.zeros(H)).square().sum()

    def mapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.vmap(loss)(q, k, v).sum()

    leaves = [x.clone().requires_grad_() for x in stacks]
    expected = torch.autograd.grad(sum(loss(*(x[i] for x in leaves)) for i in range(2)), leaves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap calls an op without a rule of its own in a loop
        found = [
            torch.func.grad(mapped, argnums=(0, 1, 2))(*stacks),
            torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacks),
            torch.autograd.grad(mapped(*leaves), leaves),
        ]
    for gradients in found:
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_saved_tensors_may_travel(emulated: EmulatedGpu) -> None:
    """Hooks may offload what is kept: q, k, v, output and LSE, and nothing of seqlen_q x seqlen_k."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def call(*inputs: torch.Tensor, **arguments: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return flashgen.attention(*inputs, **arguments)

    assert_gradients(qkv(bshd=True), {"layout": "bshd", "causal": True}, call=call)
    shapes = [(B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, DV), (B, SQ, H, DV), (B, H, SQ)]
    assert [tuple(tensor.shape) for tensor in kept] == shapes


def test_threads_run_backward_passes_of_their_own(emulated: EmulatedGpu) -> None:
    failed: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                assert_gradients([leaf(1, 2, 8, 16, seed=seed + n) for n in range(3)], {"causal": True})
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [spec.direction for spec, _ in emulated.compiled] == ["forward", "backward"]


def test_random_calls_have_the_gradients_of_torch() -> None:
    rng = random.Random(0)
    for _ in range(12):
        names = rng.sample(sorted(FEATURES), 3)
        arguments: dict[str, Any] = {"layout": rng.choice(["bhsd", "bshd"]), "deterministic": rng.random() < 0.5}
        for name in names:
            arguments |= FEATURES[name]()
        if "q_offset" in arguments and not {"causal", "window", "alibi_slopes"} & set(arguments):
            del arguments["q_offset"]
        assert_gradients(qkv(arguments["layout"] == "bshd"), arguments, lse=rng.random() < 0.5)
