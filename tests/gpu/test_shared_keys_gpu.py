"""CTAs that share the keys of a tile: both families at odd shapes, public calls, graphs, bits, time beside none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.families import family
from flashgen.codegen.hopper_forward import shares as hopper_shares
from flashgen.codegen.portable_forward import shares as portable_shares
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization
from flashgen.launch.gpu import current_device
from flashgen.measure.verify import check, oracle_of
from flashgen.runtime.ops import kernel_cache
from tests.gpu.clock import times
from tests.gpu.gate import assert_passes_the_gate
from tests.packing import Case, assert_right, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

FAMILIES: dict[str, ModuleType] = {"portable_forward": portable_shares}
if SM90:
    FAMILIES["hopper_forward"] = hopper_shares

KERNELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fwd-bf16-d128-causal", {}),
    ("fwd-bf16-d128", {}),
    ("fwd-fp16-d64-causal-offset", {}),
    ("fwd-bf16-d256-causal-softcap", {}),
    ("fwd-bf16-d64-causal-sink", {}),
    ("fwd-fp16-d128-alibi-sink", {}),
    ("fwd-bf16-d96-causal", {"split_d": True}),
    ("fwd-fp16-d80-dv40", {}),
)
OF_HOPPER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fwd-bf16-d64-causal", {"warpgroups": 3, "q_stages": 2, "masked_blocks": "branch", "hidden_blocks": "skipped"}),
    ("fwd-bf16-d128-causal", {"masked_blocks": "branch", "softmax_reference": "running"}),
    (
        "fwd-bf16-d128-causal-offset",
        {"masked_blocks": "peeled", "softmax_reference": "running", "exp_order": "free"},
    ),
    ("fwd-fp16-d64", {"warpgroups": 4, "block_n": 64, "barriers": "mbarrier", "exp_order": "free"}),
)
OF_PORTABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fwd-bf16-d128-causal", {"loads": "descriptor"}),
    ("fwd-fp32-d64-causal", {}),
    ("fwd-bf16-d128-causal-unaligned", {}),
)
ALL = [
    *((name, *kernel) for name in FAMILIES for kernel in KERNELS),
    *(("hopper_forward", *kernel) for kernel in OF_HOPPER if SM90),
    *(("portable_forward", *kernel) for kernel in OF_PORTABLE),
]


@pytest.mark.parametrize("splits", [1, 3, 32])
@pytest.mark.parametrize(("name", "key", "changes"), ALL, ids=str)
def test_shares_pass_the_gate(
    name: str, key: str, changes: dict[str, Any], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of odd shapes, most of whose tiles have fewer blocks of keys than 32."""
    monkeypatch.setattr(FAMILIES[name], "_best", lambda *_: splits)
    config = family(name).default(Specialization.parse(key), current_device()).replace(**changes, split_keys=True)
    assert_passes_the_gate(key, config)


def few_tiles(**shape: int) -> tuple[torch.Tensor, ...]:
    """One batch element of few heads, with many keys."""
    made = torch.Generator(device="cuda").manual_seed(3)
    q, k = (shape["heads"], shape["queries"]), (shape["heads"], shape["keys"])
    return tuple(
        torch.randn(1, *size, shape["head_dim"], device="cuda", dtype=torch.bfloat16, generator=made)
        for size in (q, k, k)
    )


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of another test in the cache of this process."""
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    monkeypatch.setattr(kernel_cache, "KERNELS", {})
    flashgen.reload()


SHAPES: dict[str, dict[str, int]] = {
    "a chunk behind a long cache": {"heads": 8, "queries": 64, "keys": 16384, "head_dim": 128},
    "one head": {"heads": 1, "queries": 8000, "keys": 8000, "head_dim": 64},
    "wide": {"heads": 1, "queries": 1500, "keys": 4000, "head_dim": 512},
}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_call_of_few_tiles_is_served_by_shares(name: str, causal: bool) -> None:
    q, k, v = few_tiles(**SHAPES[name])
    out, lse = flashgen.attention(q, k, v, causal=causal, return_lse=True)
    assert {config["split_keys"] for _, config, _ in kernel_cache.KERNELS} == {True}
    verdict = check(out, lse, oracle_of(q, k, v, causal=causal))
    assert not isinstance(verdict, Failure), str(verdict)
    again, lse_again = flashgen.attention(q, k, v, causal=causal, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.usefixtures("fresh")
def test_a_new_length_has_as_many_shares_as_it_takes() -> None:
    """Calls that are open in their sizes serve the third length on."""
    for keys in (16384, 9000, 30000, 500, 12345, 3000):
        q, k, v = few_tiles(heads=4, queries=100, keys=keys, head_dim=128)
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        verdict = check(out, lse, oracle_of(q, k, v, causal=True))
        assert not isinstance(verdict, Failure), f"{keys} keys: {verdict}"


@pytest.mark.usefixtures("fresh")
def test_two_graphs_of_shares_on_two_streams_at_once() -> None:
    """What shares leave belongs to a graph: two that run at once do not write to the same memory."""
    q, k, v = few_tiles(heads=4, queries=200, keys=20000, head_dim=128)
    other = few_tiles(heads=4, queries=200, keys=20000, head_dim=128)[0] * 3.0
    right = [flashgen.attention(queries, k, v, causal=True) for queries in (q, other)]
    assert {config["split_keys"] for _, config, _ in kernel_cache.KERNELS} == {True}
    graphs, outs, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for queries, stream in zip((q, other), streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                out = flashgen.attention(queries, k, v, causal=True)
        graphs.append(graph)
        outs.append(out)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out, expected in zip(outs, right, strict=True))


@pytest.mark.usefixtures("fresh")
def test_gradients_behind_shares_are_those_of_the_output() -> None:
    """The backward pass reads the LSE that was merged."""
    q, k, v = (x.requires_grad_() for x in few_tiles(heads=2, queries=700, keys=6000, head_dim=64))
    flashgen.attention(q, k, v, causal=True).float().square().mean().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT * 64**-0.5
    hidden = torch.arange(6000, device="cuda") > torch.arange(700, device="cuda")[:, None] + 5300
    out = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ exact[2]
    out.square().mean().backward()
    for found, right in zip((q, k, v), exact, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        error = (found.grad.double() - right.grad).norm() / right.grad.norm()
        assert error < 0.01


@pytest.mark.usefixtures("fresh")
def test_a_chunk_of_packed_sequences_is_served_by_shares() -> None:
    case = Case(
        queries=(100, 0, 30), keys=(9000, 70, 16000), options={"causal": True}, nheads=4, nheads_k=2, head_dim=128
    )
    packed = make(replace(case, dtype=torch.bfloat16), "cuda")
    out, lse = flashgen.attention_varlen(packed.q, packed.k, packed.v, return_lse=True, **packed.named)
    assert {config["split_keys"] for _, config, _ in kernel_cache.KERNELS} == {True}
    assert_right(packed, out, lse)


@pytest.mark.alone
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "gain"), [("a chunk behind a long cache", 2.5), ("one head", 1.3), ("wide", 1.2)], ids=str
)
def test_shares_take_less_time(name: str, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = few_tiles(**SHAPES[name])
    with_shares: Callable[[], Any] = lambda: flashgen.attention(q, k, v)  # noqa: E731
    (shared,) = times([with_shares])
    for module in FAMILIES.values():
        monkeypatch.setattr(module, "_best", lambda *_: 1)
    flashgen.reload()
    (alone,) = times([with_shares])
    monkeypatch.undo()
    flashgen.reload()
    assert alone / shared >= gain, f"{shared:.4f} ms with shares, {alone:.4f} ms without"
