"""Calls as torch runs them: one graph for torch.compile, what it asks of ops, and which go past its dispatcher."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen
from flashgen.runtime.ops import forward as ops
from flashgen.runtime.ops import outputs, runs, serve
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.mods import handle_for
from tests.tiers import first


def reference(call: Call) -> runs.Run:
    """Attention in plain torch in the place of a kernel, in the output that a kernel would get."""

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        offset: runs.Offset,
        features: Any = None,
    ) -> Any:
        out = outputs.empty_output(q, v, bshd=call.bshd)
        lse = outputs.empty_lse(q, bshd=call.bshd)
        q, k, v, view = (x.transpose(1, 2) if call.bshd else x for x in (q, k, v, out))
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if call.causal:
            shift = k.shape[2] - q.shape[2] if offset is None else offset
            shift = shift.view(-1, 1, 1, 1) if isinstance(shift, torch.Tensor) else shift
            hidden = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + shift
            scores = scores.masked_fill(hidden, -math.inf)
        view.copy_(scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1))
        lse.copy_(scores.logsumexp(-1))
        return (out, lse) if call.with_lse else out

    return run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything of a call but the kernel, on real CPU tensors."""
    monkeypatch.setattr(serve, "prepare", reference)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(bshd: bool = False, seqlen_q: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, s, d, generator=generator) for h, s, d in ((4, seqlen_q, 16), (2, 12, 16), (2, 12, 8)))
    return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if bshd else (q, k, v)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bshd", [False, True])
def test_torch_compile_finds_one_graph(bshd: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layout = "bshd" if bshd else "bhsd"
        out, lse = flashgen.attention(q * 2, k, v, layout=layout, causal=True, q_offset=1, return_lse=True)
        again = flashgen.attention(q, k, v, layout=layout, softmax_scale=0.5)
        return out + again, lse

    found = torch.compile(model, fullgraph=True, backend=backend)(*numbers(bshd))
    for one, other in zip(found, model(*numbers(bshd)), strict=True):
        torch.testing.assert_close(one, other)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("flashgen.attention" in target for target in called) == 2


@pytest.mark.usefixtures("on_cpu")
def test_torch_compile_with_lengths_that_change() -> None:
    compiled = torch.compile(
        lambda q, k, v: flashgen.attention(q, k, v, causal=True) + 1, fullgraph=True, backend="eager", dynamic=True
    )
    for length in (10, 11, 5):
        q, k, v = numbers(seqlen_q=length)
        torch.testing.assert_close(compiled(q, k, v), flashgen.attention(q, k, v, causal=True) + 1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bshd", first(1, [False, True]))
def test_the_ops_keep_what_torch_asks_of_ops(bshd: bool) -> None:
    q, k, v = numbers(bshd)
    offset = torch.tensor([1, 2], dtype=torch.int32)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q, k, v, True, 0.3, bshd, 2), test_utils=checks)
    arguments = (q, k, v, True, None, bshd, None, offset)
    torch.library.opcheck(torch.ops.flashgen.attention_lse.default, arguments, test_utils=checks)


class Marked(torch.Tensor):
    """A subclass of tensors, for which torch would have more to do."""


class DoesNothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassesOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SEEN_BY_TORCH: dict[str, Callable[[], Any]] = {
    "dispatch mode": DoesNothing,
    "function mode": PassesOn,
    "profiler": torch.profiler.profile,
}


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were called through torch's dispatcher."""
    seen: list[str] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: seen.append(name) or op(*arguments)  # type: ignore[func-returns-value]

    for name in ("attention", "attention_lse", "attention_features", "attention_features_lse"):
        monkeypatch.setattr(ops, f"{name}_op", counted(name, getattr(ops, f"{name}_op")))
    return seen


@pytest.mark.usefixtures("on_cpu")
def test_a_plain_call_saves_the_dispatcher(dispatched: list[str]) -> None:
    q, k, v = numbers()
    expected = flashgen.attention(q, k, v.as_subclass(Marked)).as_subclass(torch.Tensor)
    assert dispatched == ["attention"]
    assert torch.equal(flashgen.attention(q, k, v), expected)
    flashgen.attention(q, k, v, causal=True, q_offset=2, return_lse=True)
    flashgen.attention(q, k, v, softcap=2.0, window=(3, 3))
    flashgen.attention(q, k, v, sinks=torch.nn.Parameter(torch.zeros(4), requires_grad=False), return_lse=True)
    assert dispatched == ["attention"]
    flashgen.attention(q, k, v, sinks=torch.zeros(4).as_subclass(Marked))
    assert dispatched == ["attention", "attention_features"]
    complex_bias = torch.zeros(q.shape[2], k.shape[2], dtype=torch.complex64)
    flashgen.attention(q, k, v, bias=complex_bias.imag)
    assert dispatched == ["attention", "attention_features"]
    flashgen.attention(q, k, v, bias=complex_bias.conj().imag)  # whose sign torch has yet to change in memory
    assert dispatched == ["attention", "attention_features", "attention_features"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}])
def test_offsets_of_another_class_take_the_op(options: dict[str, Any], dispatched: list[str]) -> None:
    """Those of a DTensor lie at no address that a kernel could read."""
    q, k, v = numbers()
    offsets = torch.ones(len(q), dtype=torch.int32)
    expected = flashgen.attention(q, k, v, causal=True, q_offset=offsets, **options)
    flashgen.attention(q, k, v, causal=True, q_offset=1, **options)
    assert dispatched == []
    found = flashgen.attention(q, k, v, causal=True, q_offset=offsets.as_subclass(Marked), **options)
    assert torch.equal(found, expected)
    assert dispatched == ["attention_features" if options else "attention"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", SEEN_BY_TORCH)
def test_what_torch_has_to_see_goes_through_the_dispatcher(name: str, dispatched: list[str]) -> None:
    q, k, v = numbers()
    expected = flashgen.attention(q, k, v)
    assert dispatched == []
    with SEEN_BY_TORCH[name]():
        found = flashgen.attention(q, k, v)
        flashgen.attention(q, k, v, softcap=2.0, return_lse=True)
    assert torch.equal(found, expected)
    assert dispatched == ["attention", "attention_features_lse"]


@pytest.mark.usefixtures("on_cpu")
def test_a_transform_and_a_trace_see_the_op(dispatched: list[str]) -> None:
    q, k, v = numbers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated
        mapped = torch.vmap(flashgen.attention)(*(torch.stack([x, 2 * x]) for x in (q, k, v)))
        assert dispatched == ["attention"]
        torch.testing.assert_close(mapped[1], flashgen.attention(2 * q, 2 * k, 2 * v))
        traced = torch.jit.trace(flashgen.attention, (q, k, v), check_trace=False)
    assert "flashgen::attention" in str(traced.graph)
    other = [x + 1 for x in (q, k, v)]
    torch.testing.assert_close(traced(*other), flashgen.attention(*other))


FEATURED: dict[str, Callable[[], dict[str, Any]]] = {
    "values": lambda: {"softcap": 2.0, "window": (4, 1), "causal": True},
    "heads": lambda: {"alibi_slopes": torch.ones(4), "sinks": torch.zeros(4)},
    "scores": lambda: {"bias": torch.ones(10, 12), "mask": torch.ones(12, dtype=torch.bool)},
    "functions": lambda: {"score_mod": scored, "aux": (torch.ones(3),)},
}


def scored(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + tl.load(table + h)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("with_lse", first(1, [True, False]))
@pytest.mark.parametrize("name", FEATURED)
def test_torch_compile_finds_one_graph_with_features(name: str, with_lse: bool) -> None:
    """Every two of features, an LSE, and dynamic shapes meet."""
    arguments = FEATURED[name]()
    dynamic = with_lse == (list(FEATURED).index(name) % 2 == 0)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        found = flashgen.attention(q * 2, k, v, return_lse=with_lse, **arguments)
        return found[0] + 1 if isinstance(found, tuple) else found + 1

    torch._dynamo.reset()
    # torch begins anew for each number that it first took for a variable, which one set of features is enough for
    with torch._dynamo.config.patch(specialize_float=name != "heads"):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        torch.testing.assert_close(compiled(*numbers()), model(*numbers()))


@pytest.mark.usefixtures("on_cpu")
def test_the_ops_with_features_keep_what_torch_asks_of_ops() -> None:
    q, k, v = numbers()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    tensors = (torch.ones(4), torch.zeros(4), torch.ones(10, 12), torch.ones(10, 12, dtype=torch.bool))
    arguments = (q, k, v, True, 0.3, False, None, None, 3, None, 2.0, *tensors)
    for op in (ops.attention_features_op, ops.attention_features_lse_op):
        torch.library.opcheck(op, arguments, test_utils=checks)
    handle = handle_for(scored, None, (torch.float32,))
    given = (q, k, v, False, None, False, None, None, None, None, 0.0, None, None, None, None, handle, [torch.ones(3)])
    torch.library.opcheck(ops.attention_features_op, given, test_utils=checks)
