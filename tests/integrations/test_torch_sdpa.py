"""`scaled_dot_product_attention` by flashgen: what its arguments become, against torch's own in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.score_tensors import broadcast_kind
from flashgen.integrations import torch as door
from flashgen.integrations.torch import sdpa, sdpa_arguments
from flashgen.runtime.ops import runs
from tests.integrations.ops_on_cpu import ops_on_cpu

B, H, HK, SQ, SK, D = 2, 4, 2, 5, 7, 8
Tensor = torch.Tensor


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa_arguments, "DEVICES", ("cpu",))
    with ops_on_cpu():
        yield


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(*batch: int, heads: int = H, heads_k: int = H, rows: int = SQ, keys: int = SK) -> tuple[Tensor, ...]:
    shapes = ((*batch, heads, rows, D), (*batch, heads_k, keys, D), (*batch, heads_k, keys, D))
    return tuple(randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))


SEEN = randn(SQ, SK) > -0.3
SEEN[2] = False  # a row without keys
CASES: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "square": (qkv(B, rows=SK), {"is_causal": True}),
    "top left, more keys": (qkv(B), {"is_causal": True, "scale": 0.3}),
    "top left, more queries": (qkv(B, rows=9, keys=4), {"is_causal": True}),
    "one query": (qkv(B, rows=1), {"is_causal": True}),
    "grouped": (qkv(B, heads_k=HK), {"enable_gqa": True, "is_causal": True}),
    "one head of keys": (qkv(B, heads_k=1), {}),
    "mask": (qkv(B), {"attn_mask": SEEN}),
    "mask of keys": (qkv(B), {"attn_mask": randn(B, 1, 1, SK) > -0.5}),
    "bias of heads": (qkv(B), {"attn_mask": randn(1, H, SQ, SK).masked_fill(~SEEN, -torch.inf).requires_grad_()}),
    "bias of a batch": (qkv(B), {"attn_mask": randn(B, 1, SQ, SK).requires_grad_()}),
    "three dimensions": (qkv(heads_k=HK), {"attn_mask": randn(H, 1, SK), "enable_gqa": True}),
    "two dimensions": (tuple(x[0] for x in qkv()), {"attn_mask": SEEN}),
    "five dimensions": (qkv(2, 3), {"attn_mask": randn(2, 1, 1, SQ, SK) > -1}),
    "a batch in five": (qkv(2, 3), {"attn_mask": randn(3, 1, SQ, SK)}),
    "one mask in five": (qkv(2, 3), {"attn_mask": randn(1, 1, 1, SQ, SK)}),
    "upper left": (qkv(B), {"attn_mask": causal_upper_left(SQ, SK)}),
    "lower right": (qkv(B), {"attn_mask": causal_lower_right(SQ, SK)}),
    "rows apart": (tuple(x.transpose(-1, -2).detach().requires_grad_() for x in qkv(B, rows=D, keys=D)), {}),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_attention(name: str) -> None:
    inputs, given = CASES[name]
    leaves = [*inputs, *(x for x in given.values() if isinstance(x, Tensor) and x.requires_grad)]
    with door.route_sdpa(strict=True) as calls:
        found = F.scaled_dot_product_attention(*inputs, **given)
    wide = dict(given)
    if type(given.get("attn_mask")) is Tensor and given["attn_mask"].is_floating_point():
        wide["attn_mask"] = given["attn_mask"].double()
    expected = F.scaled_dot_product_attention(*(x.double() for x in inputs), **wide)
    assert calls.served == 1
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    weights = randn(*found.shape, seed=9)
    grads = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_tensors_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(flashgen, "attention", lambda **call: given.update(call) or call["q"])
    monkeypatch.setattr(sdpa_arguments, "DEVICES", ("cpu",))
    q, k, v = (randn(B, SK, H, D).transpose(1, 2) for _ in range(3))
    keys = torch.ones(B, 1, 1, SK, dtype=torch.bool)
    with door.route_sdpa():
        F.scaled_dot_product_attention(q, k, v, attn_mask=keys)
        assert [given[name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
        assert given["q"].stride() == q.stride()
        assert broadcast_kind(given["mask"]) == "keys"
        given.clear()
        F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.25)
    assert given["dropout_p"] == 0.25
    assert (given["causal"], "q_offset" in given) == (True, False)  # an offset would keep SDPA from serving it


Q, K, V = (x.detach() for x in qkv(B))
PASSED_ON: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((Q.double(), K.double(), V.double()), {}, "got torch.float64"),
    ((Q, K, V), {"dropout_p": 1.0}, "dropout_p is at least 0"),
    ((Q, K, V), {"scale": 0.0}, "scale is finite"),
    ((Q, K[:1], V[:1]), {}, "without broadcasting"),
    ((Q, K[:, :2, :, :0], V[:, :2]), {}, "at least one head, and a head_dim"),
    ((Q, K, V), {"attn_mask": torch.ones(SQ, SK, dtype=torch.float64)}, "got torch.float64"),
    ((Q, K, V), {"attn_mask": torch.ones(SQ, SK + 1)}, "attn_mask broadcasts"),
    ((Q, K, V), {"attn_mask": SEEN, "is_causal": True}, "exclude each other"),
    ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}, "a multiple of them"),
    ((Q, K[:, :2], V[:, :2]), {}, "with enable_gqa"),
    ((Q.to_sparse(), K, V), {}, "dense"),
]


@pytest.mark.parametrize(("inputs", "given", "words"), PASSED_ON, ids=[words for _, _, words in PASSED_ON])
def test_what_flashgen_does_not_take_goes_on_to_torch(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[Any, ...], given: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(sdpa_arguments, "DEVICES", ("cpu",))

    def outcome() -> Any:
        torch.manual_seed(0)
        try:
            return F.scaled_dot_product_attention(*inputs, **given)
        except (RuntimeError, NotImplementedError) as error:
            return str(error)

    with door.route_sdpa() as calls:
        found = outcome()
    torch.testing.assert_close(found, outcome(), equal_nan=True) if isinstance(found, Tensor) else None
    assert isinstance(found, Tensor) or found == outcome()
    (reason,) = calls.passed_on
    assert words in reason
    with door.route_sdpa(strict=True), pytest.raises(UnsupportedError, match="does not take this call"):
        F.scaled_dot_product_attention(*inputs, **given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_on_a_cpu_and_of_no_kernel_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with door.route_sdpa() as calls:
        F.scaled_dot_product_attention(Q, K, V)
        nested = torch.nested.nested_tensor_from_jagged(randn(8, H, D), torch.tensor([0, 5, 8]))
        F.scaled_dot_product_attention(*[nested.transpose(1, 2)] * 3)
        monkeypatch.setattr(sdpa_arguments, "DEVICES", ("cpu",))  # the call itself says that it has no kernel
        F.scaled_dot_product_attention(Q, K, V)
    first, second, third = calls.passed_on
    assert "run on a GPU, got a tensor on cpu" in first
    assert "NestedTensor" in second
    assert third.startswith("no kernel family serves")
    assert str(calls).startswith("0 calls served by flashgen, 3 passed on to torch\n  1: ")
    calls.clear()
    assert str(calls) == "0 calls served by flashgen, 0 passed on to torch"


@pytest.mark.usefixtures("on_cpu")
def test_multi_head_attention_and_functions() -> None:
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = randn(B, SQ, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    routing = door.route_sdpa(strict=True)
    found = routing(layer)(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(found, expected)
    assert routing.calls.served == 1
    with door.route_sdpa() as outer, door.route_sdpa() as inner:
        layer.eval()(x, x, x, need_weights=False)
    assert (outer.served, inner.served) == (0, 1)


@pytest.mark.usefixtures("on_cpu")
def test_the_whole_process() -> None:
    own = F.scaled_dot_product_attention
    calls = door.enable()
    try:
        assert door.enable() is calls
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(Q.double(), K.double(), V.double()))
        thread.start()
        thread.join()
        torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V), own(Q, K, V))
        assert (calls.served, calls.passed_on.total()) == (1, 1)
        door.enable(strict=True)
        with pytest.raises(UnsupportedError, match="does not take"):
            F.scaled_dot_product_attention(Q, K, V, scale=-0.1)
    finally:
        door.disable()
    door.disable()
    assert F.scaled_dot_product_attention is own
    assert runs.scaled_dot_product_attention is own  # what a handed over call is served by


def test_a_thread_that_disables_waits_for_one_that_enables(monkeypatch: pytest.MonkeyPatch) -> None:
    own, thread = F.scaled_dot_product_attention, threading.Thread(target=door.disable)

    def bias_of_torch() -> Any:
        thread.start()
        thread.join(0.2)  # what is not held back is done by then
        return real()

    real = sdpa._bias_of_torch
    monkeypatch.setattr(sdpa, "_bias_of_torch", bias_of_torch)
    try:
        assert door.enable().served == 0
        thread.join()
        assert F.scaled_dot_product_attention is own
    finally:
        door.disable()


@pytest.mark.parametrize("bias", [causal_upper_left(SQ, SK), causal_lower_right(SQ, SK)], ids=["upper", "lower"])
def test_a_causal_bias_finds_torchs_function_in_the_whole_process(bias: Tensor) -> None:
    """Torch knows such a call by the function that `enable` replaces."""
    own = F.scaled_dot_product_attention
    expected = own(Q, K, V, attn_mask=bias)
    calls = door.enable()
    calls.clear()
    try:
        torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V, attn_mask=bias), expected)
        assert (calls.served, calls.passed_on.total()) == (0, 1)
        torch.testing.assert_close(own(Q, K, V, attn_mask=bias), expected)  # a program that has taken it before
        assert calls.passed_on.total() == 1
        assert repr(bias) == repr(bias._materialize())  # type: ignore[operator]
    finally:
        door.disable()
    torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V, attn_mask=bias), expected)


class Scripted(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_torchscript_keeps_torchs_function_in_the_whole_process() -> None:
    door.enable(strict=True)
    try:
        found = torch.jit.script(Scripted())(Q, K, V)  # type: ignore[no-untyped-call]
    finally:
        door.disable()
    torch.testing.assert_close(found, Scripted()(Q, K, V))


@pytest.mark.usefixtures("on_cpu")
def test_torch_compile_sees_an_op() -> None:
    inputs = qkv(B, heads_k=HK)
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) + 1

    with door.route_sdpa(strict=True):
        found = torch.compile(call, backend=keep, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, call(*inputs), atol=1e-5, rtol=1e-5)
    (code,) = graphs
    assert "flashgen.attention_train" in code
    assert "scaled_dot_product" not in code


class Attending(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) * 2


@pytest.mark.usefixtures("on_cpu")
def test_an_exported_program_has_the_op_and_other_lengths() -> None:
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {name: {2: length} for name in "qkv"}
    inputs, others = (tuple(x.detach() for x in qkv(B, heads_k=HK, rows=n, keys=n)) for n in (SK, 12))
    with door.route_sdpa(strict=True):
        program = torch.export.export(Attending(), inputs, dynamic_shapes=shapes)
    assert "flashgen.attention" in program.graph_module.code
    torch.testing.assert_close(program.module()(*others), Attending()(*others), atol=1e-5, rtol=1e-5)


def test_disabling_what_is_not_enabled_leaves_the_functions_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any, **named: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", other)
    door.disable()
    assert torch.nn.functional.scaled_dot_product_attention is other


@pytest.mark.usefixtures("on_cpu")
def test_a_block_sees_its_calls_in_a_process_that_is_routed_as_a_whole() -> None:
    whole = door.enable()
    whole.clear()
    try:
        with door.route_sdpa() as calls:
            F.scaled_dot_product_attention(Q, K, V)
        F.scaled_dot_product_attention(Q, K, V)
        assert (calls.served, whole.served) == (1, 1)
    finally:
        door.disable()


def test_functions_that_run_behind_their_call_are_refused_as_decorated_ones() -> None:
    async def coroutine() -> None:
        F.scaled_dot_product_attention(Q, K, V)

    def generator() -> Iterator[Tensor]:
        yield F.scaled_dot_product_attention(Q, K, V)

    async def both() -> Any:
        yield 1

    for function in (coroutine, generator, both):
        with pytest.raises(UnsupportedError, match="no generators and coroutines"):
            door.route_sdpa()(function)
