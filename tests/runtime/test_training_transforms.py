"""Gradients under torch's transforms of functions: vmap and grad in either order, and no tangents."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.autograd import forward_ad

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.launch import plan
from tests.fakes.gpu import MARK, EmulatedGpu
from tests.runtime.training import FEATURES, SQ, B, D, H, leaf, qkv
from tests.tiers import every

pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")


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
    found = [
        torch.func.grad(mapped, argnums=(0, 1, 2))(*stacks),
        torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacks),
        torch.autograd.grad(mapped(*leaves), leaves),
    ]
    for gradients in found:
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def of_heads(b, h, q_idx, k_idx, last):  # type: ignore[no-untyped-def]
    return k_idx <= tl.load(last + h)


@pytest.mark.parametrize("packed", [False, True])
def test_vmap_over_what_a_function_loads_from(packed: bool) -> None:
    """Torch looks for mapped tensors in no optional list: alone they are refused, and with q they are taken apart."""
    last = torch.tensor([[3] * H, [5] * H], dtype=torch.int32)
    rows = torch.randn(2, SQ, H, D) if packed else torch.randn(2, 1, H, SQ, D)
    ends = torch.tensor([0, SQ], dtype=torch.int32)

    def attend(x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        if packed:
            return flashgen.attention_varlen(x, x, x, ends, max_seqlen_q=SQ, mask_mod=of_heads, aux=(last,))
        return flashgen.attention(x, x, x, mask_mod=of_heads, aux=(last,))

    function = "attention_varlen" if packed else "attention"
    refused = rf"vmap maps flashgen\.{function} over aux tensors and block masks only together with q, k or v"
    with pytest.raises(UnsupportedError, match=refused):
        torch.vmap(attend, in_dims=(None, 0))(rows[0], last)
    with pytest.raises(UnsupportedError, match=refused):
        torch.vmap(lambda one: torch.func.grad(lambda x: attend(x, one).sum())(rows[0]))(last)
    nested = torch.vmap(torch.vmap(attend, in_dims=(0, None)), in_dims=(None, 0))
    with pytest.raises(UnsupportedError, match=refused):
        nested(rows, last)
    found = torch.vmap(attend)(rows, last)
    for number in range(2):
        torch.testing.assert_close(found[number], attend(rows[number], last[number]))


@pytest.mark.parametrize("features", ["causal", "sinks", "bias of heads"])
@pytest.mark.parametrize("asked", [(0, 1), (0,), (1,)], ids=["both", "output", "lse"])
def test_gradients_for_a_batch_of_gradients(features: str, asked: tuple[int, ...]) -> None:
    arguments, inputs = FEATURES[features](), qkv()
    leaves = [x for x in (*inputs, *arguments.values()) if isinstance(x, torch.Tensor)]
    leaves = leaves[:2] if asked == (1,) else leaves  # values have no part in an LSE
    both = flashgen.attention(*inputs, **arguments, return_lse=True)
    outputs = [both[number] for number in asked]
    batches = [torch.randn(3, *one.shape) for one in outputs]
    found = torch.autograd.grad(outputs, leaves, batches, is_grads_batched=True, retain_graph=True)
    for number in range(3):
        expected = torch.autograd.grad(outputs, leaves, [batch[number] for batch in batches], retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[number], other)


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_packed_sequences_for_a_batch_of_gradients(
    sinks: bool, emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("make_plan", "make_backward_plan"):  # which leave marks
        monkeypatch.setattr(plan, name, getattr(super(EmulatedGpu, emulated), name))
    inputs = [leaf(8, 2, D, seed=number) for number in range(3)]
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"sinks": torch.zeros(2)} if sinks else {}
    out = flashgen.attention_varlen(*inputs, ends, max_seqlen_q=5, **given)
    for gradient in torch.autograd.grad(out, inputs, torch.randn(3, *out.shape), is_grads_batched=True):
        torch.testing.assert_close(gradient, torch.full((3, 8, 2, D), MARK))
    assert len(emulated.launched_backward) == 3


def decodes(x: torch.Tensor) -> Any:
    cache, lengths = torch.ones(B, 8, H, D).bfloat16(), torch.full((B,), 3, dtype=torch.int32)
    return flashgen.attention_decode(x.mT.bfloat16(), cache, cache, lengths)


def appends(x: torch.Tensor) -> Any:
    cache = torch.zeros(B, 8, H, SQ)
    return flashgen.append_kv(x, x, cache, cache.clone(), 0, rotary_cos=x[0, 0], rotary_sin=x[0, 0], q=x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where forward-mode derivatives begin
@pytest.mark.parametrize("call", [decodes, appends])
def test_what_has_no_gradient_is_refused_under_transforms_too(call: Callable[[torch.Tensor], Any]) -> None:
    """Without a word, every gradient would be 0, and every tangent missing."""
    x = torch.ones(B, 2, H, SQ)
    with pytest.raises(UnsupportedError, match=r"has no (backward pass|gradient)"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(UnsupportedError, match=r"no forward-mode derivative$"):
        torch.func.jvp(call, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"no forward-mode derivative$"):
        call(forward_ad.make_dual(x, x))


def test_a_map_of_calls_that_write_in_place_is_refused() -> None:
    new, caches = torch.zeros(3, B, 2, H, SQ), torch.zeros(3, B, 8, H, SQ)
    for given in ({}, {"rotary_cos": torch.zeros(8, 8), "rotary_sin": torch.zeros(8, 8)}):

        def append(x: torch.Tensor, k: torch.Tensor, given: dict[str, Any] = given) -> Any:
            return flashgen.append_kv(x, x, k, k.clone(), 0, **given, **({"q": x} if given else {}))

        with pytest.raises(UnsupportedError, match=r"vmap does not map flashgen\.append_kv"):
            torch.vmap(append)(new, caches)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "rotary_cos", "rotary_sin"])
def test_learned_scores_of_what_has_no_gradient_are_refused(name: str) -> None:
    learned = torch.zeros(H, requires_grad=True)
    q, cache = torch.ones(B, 1, H, 16).bfloat16(), torch.zeros(B, 8, H, 16).bfloat16()
    if "rotary" in name:
        tables = {"rotary_cos": torch.ones(8, 8), "rotary_sin": torch.ones(8, 8)}
        tables[name].requires_grad_()
        with pytest.raises(UnsupportedError, match="append_kv has no gradient"):
            flashgen.append_kv(q, q, cache, cache.clone(), 0, **tables)
        return
    with pytest.raises(UnsupportedError, match="attention_decode has no backward pass"):
        flashgen.attention_decode(q, cache, cache, torch.zeros(B, dtype=torch.int32), **{name: learned})


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[1](torch.ones_like(call(x)))[0],
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[1],
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x])),
}


@pytest.mark.filterwarnings("ignore")  # what torch says of its own tracing
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", every(2, [*CALLS[:4], decodes, appends]))
def test_no_transform_is_compiled_that_may_ask_for_a_gradient(
    call: Callable[[torch.Tensor], Any], transform: str
) -> None:
    """Dynamo tells no tensor's gradient there: an op without one would be traced, and gradients be 0."""
    torch._dynamo.reset()
    shape = {attends_packed: (2, 2, H, D), decodes: (B, 2, H, SQ), appends: (B, 2, H, SQ)}.get(call, (B, H, SQ, SQ))
    compiled: Any = torch.compile(functools.partial(TRANSFORMS[transform], call), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"inside torch\.compile has no gradient under transforms of torch\.func"):
        compiled(torch.ones(shape))


@pytest.mark.filterwarnings("ignore")
def test_a_map_without_gradients_is_compiled() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv())
    with torch.no_grad():
        mapped: Any = torch.compile(torch.vmap(flashgen.attention), backend="eager", fullgraph=True)
        stacks = [torch.stack([x, 2 * x]) for x in (q, k, v)]
        torch.testing.assert_close(mapped(*stacks)[1], flashgen.attention(2 * q, 2 * k, 2 * v))
