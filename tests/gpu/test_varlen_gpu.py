"""`flashgen.attention_varlen` on a GPU: features against float64, poison, graphs, memory, bits, compiles."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.core.settings import settings
from flashgen.runtime.ops import kernel_cache
from tests.covering import covering_array
from tests.gpu import packed_cases
from tests.gpu.packed_cases import BF16, KEYS, WIDE
from tests.packing import Case, Packed, assert_gradients, assert_right, gradients, make

pytestmark = pytest.mark.gpu


def document(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return q_idx // 100 == k_idx // 100


def apart(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return (q_idx // 50 + h + b) % 3 != k_idx // 70 % 3


def bent(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return score / (1.0 + 0.1 * score * score) + 0.1 * (h - b) * (q_idx // 100 - k_idx // 100)


MASKS = {"": None, "document": document, "by sequence and head": apart}
FACTORS: dict[str, tuple[Any, ...]] = {
    "dims": ((128, 128), (64, 64), (96, 80), (256, 256)),
    "dtype": (BF16, torch.float16, torch.float32),
    "heads": ((8, 2), (4, 4), (5, 1)),
    "keys": (None, KEYS),
    "position": ("none", "causal", "window", "causal window"),
    "used": (False, True),
    "softcap": (False, True),
    "alibi": ("", "shared", "own"),
    "sinks": (False, True),
    "mod": tuple(MASKS),
    "score_mod": (False, True),
    "layout": ("packed", "heads", "odd"),
    "spare": (0, 200),
    "poison": ((), (1, 5)),
}
CASES = covering_array(FACTORS)


def case_of(row: dict[str, Any]) -> Case:
    """The call of a row of the covering array."""
    return replace(packed_cases.case_of(row), mod=MASKS[row["mod"]], score_mod=bent if row["score_mod"] else None)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


def run(packed: Packed, **changes: Any) -> Any:
    """The public call."""
    return flashgen.attention_varlen(packed.q, packed.k, packed.v, **{**packed.named, **changes})


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features_is_right(number: int) -> None:
    packed = make(case_of(CASES[number]), "cuda")
    out, lse = run(packed, return_lse=True)
    assert_right(packed, out, lse)
    again, lse_again = run(packed, return_lse=True)
    assert torch.equal(out.nan_to_num(), again.nan_to_num())
    assert torch.equal(lse.nan_to_num(), lse_again.nan_to_num())


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_gradients_of_every_pair_of_features_are_right(number: int, deterministic: bool) -> None:
    packed = make(case_of(CASES[number]), "cuda")
    given = {name: getattr(packed, name).detach().requires_grad_() for name in "qkv"}
    if "sinks" in packed.named:
        given["sinks"] = packed.named["sinks"].clone().requires_grad_()
    out = flashgen.attention_varlen(**{**packed.named, **given}, deterministic=deterministic)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    counts = torch.zeros(len(out), dtype=torch.bool)
    for b, queries, _ in packed.sequences():
        counts[queries] = b not in packed.case.poison
    dout[~counts] = math.nan
    found = torch.autograd.grad(out, tuple(given.values()), dout, retain_graph=True)
    right = gradients(packed, dout)
    if packed.case.poison:
        right.pop("sinks", None)  # of sequences of NaN, too
    # of keys that do not count in a sequence of NaN some kernels make 0 and others NaN
    assert_gradients(packed, dict(zip(given, found, strict=True)), right, whole=True)
    if deterministic:
        again = torch.autograd.grad(out, tuple(given.values()), dout)
        assert all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in zip(found, again, strict=True))


def test_the_gradients_of_a_sequence_follow_from_itself_alone() -> None:
    lengths, rows = (400, 1000, 7, 290), slice(400, 1400)
    whole = make(Case(queries=lengths, options={"causal": True, "deterministic": True}, **WIDE), "cuda")
    alone = torch.tensor([0, 1000], dtype=torch.int32, device="cuda")

    def of(part: slice, **changes: Any) -> tuple[torch.Tensor, ...]:
        given = [one[part].detach().requires_grad_() for one in (whole.q, whole.k, whole.v)]
        out = flashgen.attention_varlen(*given, **{**whole.named, **changes})
        return torch.autograd.grad(out, given, out.detach())

    one = of(rows, cu_seqlens_q=alone, max_seqlen_q=1000, max_seqlen_k=1000)
    assert all(torch.equal(a[rows], b) for a, b in zip(of(slice(None)), one, strict=True))


@pytest.mark.parametrize("batch", [1, 255, 256, 257, 1500])
def test_many_sequences(batch: int) -> None:
    lengths = tuple(random.Random(batch).choice((0, 1, 2, 15, 16, 17, 130)) for _ in range(batch))
    packed = make(Case(queries=lengths, nheads=2, nheads_k=1, head_dim=64, options={"causal": True}), "cuda")
    assert_right(packed, *run(packed, return_lse=True))


def test_the_bits_of_a_sequence_follow_from_itself_alone() -> None:
    """Where a call is deterministic: otherwise a batch of another size may have another config."""
    options = {"causal": True, "deterministic": True}
    whole = make(Case(queries=(400, 3000, 7, 1290), options=options, **WIDE), "cuda")
    out, lse = run(whole, return_lse=True)
    rows = slice(400, 3400)
    ends = torch.tensor([0, 3000], dtype=torch.int32, device="cuda")
    alone = replace(whole, q=whole.q[rows], k=whole.k[rows], v=whole.v[rows])
    one, one_lse = run(alone, return_lse=True, cu_seqlens_q=ends, max_seqlen_q=3000, max_seqlen_k=3000)
    assert torch.equal(out[rows], one)
    assert torch.equal(lse[:, rows], one_lse)


def test_one_captured_graph_serves_all_lengths() -> None:
    batch, rows = 9, 4096
    packed = make(Case(queries=(rows // batch,) * batch, spare=rows % batch, options={"causal": True}, **WIDE), "cuda")
    packed = replace(packed, **{name: getattr(packed, name).nan_to_num() for name in "qkv"})
    bound = {"max_seqlen_q": rows, "max_seqlen_k": rows}
    run(packed, **bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(packed, return_lse=True, **bound)
    draw = random.Random(0)
    for _ in range(20):
        ends = sorted(draw.randint(0, rows) for _ in range(batch))
        packed.named["cu_seqlens_q"].copy_(torch.tensor([0, *ends], dtype=torch.int32))
        graph.replay()
        eager, eager_lse = run(packed, return_lse=True, **bound)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        assert not out[ends[-1] :].any()
        assert (lse[:, ends[-1] :] == -math.inf).all()


def test_graphs_of_deterministic_gradients_may_run_side_by_side() -> None:
    batch, rows = 5, 2048
    case = Case(queries=(rows // batch,) * batch, spare=rows % batch, options={"causal": True}, **WIDE)
    streams, graphs, found, calls = [torch.cuda.Stream() for _ in range(2)], [], [], []
    for seed, stream in enumerate(streams):
        packed = make(case, "cuda", seed)
        given = [getattr(packed, name).nan_to_num().requires_grad_() for name in "qkv"]
        named = {**packed.named, "max_seqlen_q": rows, "max_seqlen_k": rows, "deterministic": True}

        def gradients_of(given: list[torch.Tensor] = given, named: dict[str, Any] = named) -> tuple[torch.Tensor, ...]:
            out = flashgen.attention_varlen(*given, **named)
            return torch.autograd.grad(out, given, out.detach())

        with torch.cuda.stream(stream):
            gradients_of()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append([gradients_of() for _ in range(4)])
        graphs.append(graph)
        calls.append((gradients_of, named["cu_seqlens_q"]))
    draw = random.Random(4)
    for _ in range(20):
        for _, ends in calls:
            ends.copy_(torch.tensor([0, *sorted(draw.randint(0, rows) for _ in range(batch))], dtype=torch.int32))
        for one in (each for several in found for passes in several for each in passes):
            one.fill_(math.nan)
        expected = [gradients_of() for gradients_of, _ in calls]
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for several, right in zip(found, expected, strict=True):
            assert all(torch.equal(one, two) for passes in several for one, two in zip(passes, right, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_batches_of_other_sizes_wait_for_nothing_and_compile_nothing() -> None:
    def batch(draw: random.Random) -> Packed:
        lengths = tuple(draw.randint(0, 600) for _ in range(draw.randint(1, 40)))
        return make(Case(queries=lengths or (1,), options={"causal": True}, **WIDE), "cuda")

    draw = random.Random(1)
    flashgen.warmup(["b40-h8-hk2-tq24000-s600-d128-causal-varlen"])
    kernels = len(kernel_cache.KERNELS)
    batches = [batch(draw) for _ in range(40)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for packed in batches:
            run(packed)
        before = torch.cuda.memory_stats()
        for packed in batches:
            run(packed)
        after = torch.cuda.memory_stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(kernel_cache.KERNELS) == kernels
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert after["active_bytes.all.current"] == before["active_bytes.all.current"]


def test_ends_that_lead_out_of_the_tensors_do_not() -> None:
    packed = make(Case(queries=(200, 330, 50), options={"causal": True}, **WIDE), "cuda")
    wild = torch.tensor([-5, 700, 300, 2**31 - 1], dtype=torch.int32, device="cuda")
    run(packed, cu_seqlens_q=wild, max_seqlen_q=2000)
    torch.cuda.synchronize()


def test_contents_are_checked_where_the_setting_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    settings.cache_clear()
    packed = make(Case(queries=(200, 330), **WIDE), "cuda")
    run(packed)
    with pytest.raises(WorkloadError, match="max_seqlen_q"):
        run(packed, max_seqlen_q=300)


def test_torch_compile_gives_the_same() -> None:
    packed = make(Case(queries=(200, 330), options={"causal": True}, **WIDE), "cuda")
    compiled = torch.compile(lambda one: run(one) * 1.0, fullgraph=True)
    assert torch.equal(compiled(packed), run(packed))
    q = packed.q.clone().requires_grad_()
    (found,) = torch.autograd.grad(compiled(replace(packed, q=q)).sum(), q)
    (right,) = torch.autograd.grad(run(replace(packed, q=q)).sum(), q)
    torch.testing.assert_close(found, right, atol=1e-2, rtol=1e-2)
