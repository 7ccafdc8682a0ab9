"""The benchmarks of packed sequences without a GPU: their batches, what a row says, and that peers compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from benchmarks import varlen, varlen_impls
from benchmarks.cases import selected
from benchmarks.exit_codes import STOPPED
from benchmarks.impls import Call, results_of
from benchmarks.provenance import Provenance
from benchmarks.results import ResultsFile, subject_of
from benchmarks.variants import fastest
from benchmarks.varlen import Timed
from benchmarks.varlen_cases import PACKS, Pack, PackTensors, padded, tensors_of, unpadded
from benchmarks.varlen_impls import IMPLS, Ready, VarlenImpl
from benchmarks.varlen_tables import varlen_parts
from flashgen import reference
from flashgen.core.workload import Workload
from tests.benchmarks.races import FakeGpu
from tests.benchmarks.rows import SHARED

CPU = torch.device("cpu")


def small(key: str) -> Pack:
    return Pack(workload=Workload.parse(key))


SELF = small("b3-tq40-s30-h4-hk2-d16-causal-varlen-ramp")
ALL_SEE = small("b3-tq40-s30-h4-hk2-d16-varlen-ramp")
STEPS = small("b4-tq12-tk120-sq10-sk60-h4-hk2-d16-causal-varlen-page16-mixed")
CHUNKS = small("b4-tq20-tk120-sq10-sk60-h4-hk2-d16-causal-varlen-mixed")


def test_batches_are_told_apart_and_of_16k_rows_at_least_in_training() -> None:
    assert len({pack.workload.key for pack in PACKS}) == len(PACKS)
    assert all(pack.workload == Workload.parse(pack.workload.key) and pack.workload.lengths for pack in PACKS)
    assert all((pack.workload.total_q or 0) >= 16384 for pack in PACKS if pack.trains)
    assert {pack.workload.lengths for pack in PACKS} == {"same", "ramp", "tail", "mixed"}
    assert [pack.suite for pack in selected(PACKS, ["bwd-*-h12-*"])] == ["varlen_training"] * 2


def test_a_run_does_its_part_until_its_time_is_over_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(varlen, "serve_generated", lambda *given: None)
    raced: list[Pack] = []
    ticks = itertools.count(0.0, 10.0)

    def race(pack: Pack, impls: Sequence[VarlenImpl], *given: object, **more: object) -> list[tuple[VarlenImpl, Timed]]:
        raced.append(pack)
        return [(impls[0], Timed(ms=0.5, timing="queue"))]

    monkeypatch.setattr(varlen, "race", race)
    monkeypatch.setattr(varlen, "PACKS", PACKS[:10])  # each ends with a collection of garbage
    command = ["--results", str(tmp_path), "--append", "--shard", "1/2"]
    assert varlen.main([*command, "--limit-seconds", "45"], clock=lambda: next(ticks)) == STOPPED
    assert 0 < len(raced) < len(PACKS[1:10:2])
    assert varlen.main(command) == 0
    assert raced == list(PACKS[1:10:2])


def test_a_part_calls_its_share_once_and_races_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(varlen, "serve_generated", lambda *given: None)
    monkeypatch.setattr(varlen, "tensors_of", lambda pack, where: pack)
    monkeypatch.setattr(varlen, "race", lambda *given, **more: pytest.fail("a part races nothing"))
    monkeypatch.setattr(varlen, "release", lambda: None)  # a search for garbage behind each batch
    called: list[str] = []

    def ready(pack: Pack, tensors: object) -> Ready:
        assert tensors is pack
        assert torch.is_grad_enabled() == pack.trains
        return Ready(call=Call(run=lambda n: called.append(pack.workload.key)))

    one = VarlenImpl(name="one", version=lambda: "1", unsupported=lambda pack: None, prepare=ready)
    monkeypatch.setattr(varlen, "with_flex", lambda impls, choice: (one,))
    command = ["--results", str(tmp_path), "--shard", "0/2", "--compile-part"]
    assert [varlen.main([*command, f"{index}/3"]) for index in range(3)] == [0] * 3
    assert sorted(called) == sorted(pack.workload.key for pack in PACKS[::2])
    called.clear()
    first, *others = PACKS[::2]
    row = subject_of(first.suite, first.workload.key, "one", first.workload.lengths)
    monkeypatch.setattr(ResultsFile, "done", lambda self, commit: {row})
    assert varlen.main([*command, "0/1"]) == 0
    assert called == [pack.workload.key for pack in others], "what has a row is raced no more"


@pytest.mark.parametrize("pack", [pack for pack in PACKS if pack.is_self_attention], ids=lambda pack: pack.workload.key)
def test_the_dense_batch_has_as_many_pairs_a_row(pack: Pack) -> None:
    dense, rows = pack.dense, sum(pack.queries)
    assert not dense.is_packed
    by_row = dense.all_pairs / (dense.batch * dense.seqlen_q)
    assert by_row == pytest.approx(pack.workload.all_pairs / rows, rel=0.01)
    assert dense.batch * dense.seqlen_q == pytest.approx(rows, rel=0.35)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Any, k: Any, v: Any, *, layout: str, block_mask: None = None, **options: Any) -> torch.Tensor:
        heads = (one.transpose(1, 2).contiguous() for one in (q, k, v))
        return reference.attention(*heads, **options).transpose(1, 2)

    monkeypatch.setattr(flashgen, "attention_varlen", reference.attention_varlen, raising=False)
    monkeypatch.setattr(flashgen, "attention", attention, raising=False)
    monkeypatch.setattr(flashgen, "block_mask", lambda mask_mod, **sizes: None, raising=False)


UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


@UNFUSED
@pytest.mark.parametrize(
    "key",
    [SELF.workload.key, "bwd-" + SELF.workload.key[4:], ALL_SEE.workload.key, CHUNKS.workload.key, STEPS.workload.key],
)
def test_what_runs_on_a_cpu_computes_the_same(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    pack = small(key)
    tensors = tensors_of(pack, CPU)
    expected = varlen.last_output(pack, tensors)
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for impl in IMPLS:
        if impl.name in ("torch-varlen", "fa3", "fa4") or impl.unsupported(pack) is not None:
            continue
        if impl.name == "flex" and pack.trains:
            continue  # it has no backward pass on a CPU
        ready = impl.prepare(pack, tensors)
        assert varlen.why_wrong(ready, expected) is None, impl.name
        found[impl.name] = results_of(ready.call.run(0))
        if ready.rows is not None:
            assert "away from" in str(varlen.why_wrong(ready, expected + 1.0)), impl.name
    names = {"flashgen", "flashgen-dense", "flashgen-mask", "sdpa-padded"} if pack.is_self_attention else {"flashgen"}
    assert found.keys() - {"flex"} == names
    assert ("flex" in found) == (pack.is_self_attention and not pack.trains)
    if pack.trains:
        ours = found["flashgen"][:3]
        for one, other in zip(ours, found["sdpa-padded"][:3], strict=True):
            torch.testing.assert_close(one, unpadded(other, pack.queries), atol=5e-2, rtol=5e-2)
        for one, other in zip(ours, found["flashgen-mask"][:3], strict=True):
            torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


def test_rows_are_padded_and_unpadded() -> None:
    rows = torch.arange(6.0).view(6, 1, 1)
    found = padded(rows, (1, 0, 5))
    assert found.shape == (3, 1, 5, 1)
    assert found[0].flatten().tolist() == [0, 0, 0, 0, 0]
    assert torch.equal(unpadded(found, (1, 0, 5)), rows)


def test_steps_of_decoding_stand_in_front_and_pages_hold_their_keys() -> None:
    assert (STEPS.suite, STEPS.num_decodes, CHUNKS.num_decodes) == ("varlen_pages", 3, 0)
    assert not STEPS.is_self_attention
    paged = [pack for pack in PACKS if pack.is_paged]
    assert [(pack.workload.page_size, pack.num_decodes) for pack in paged] == [(64, 0), (16, 0), (16, 48), (16, 48)]
    tensors = tensors_of(STEPS, CPU)
    assert tensors.table is not None
    assert tensors.lens_k.tolist() == list(STEPS.keys)
    used = [row[: -(-length // 16)].tolist() for row, length in zip(tensors.table, STEPS.keys, strict=True)]
    assert sorted(itertools.chain.from_iterable(used)) == list(range(len(tensors.k[0])))


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch, **functions: Any) -> VarlenImpl:
    """An implementation whose module has these functions alone."""
    module = SimpleNamespace(**functions)
    monkeypatch.setattr(varlen_impls.importlib, "import_module", lambda _: module)
    monkeypatch.setattr(varlen_impls.importlib.util, "find_spec", lambda _: module)
    monkeypatch.setattr(varlen_impls.fa4, "limits", lambda _: None)
    return next(impl for impl in IMPLS if impl.name == name)


def test_heads_that_share_keys_are_repeated_for_a_function_without_a_word_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def varlen_attn(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, most_q: int, most_k: int, **options: Any) -> Any:
        assert (k.shape[1], options) == (q.shape[1], {"is_causal": True})
        return reference.attention_varlen(
            q, k, v, ends_q, ends_k, max_seqlen_q=most_q, max_seqlen_k=most_k, causal=True
        )

    impl = calls_of("torch-varlen", monkeypatch, varlen_attn=varlen_attn)
    pack = small("bwd-" + SELF.workload.key[4:])
    tensors = tensors_of(pack, CPU)
    assert impl.unsupported(pack) is None
    ready = impl.prepare(pack, tensors)
    assert varlen.why_wrong(ready, varlen.last_output(pack, tensors)) is None
    _, dk, dv, _ = results_of(ready.call.run(0))
    assert dk.shape == dv.shape == tensors.k[0].shape
    assert "pages" in str(impl.unsupported(STEPS))


def test_peers_get_pages_by_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(STEPS, CPU)
    expected = varlen.last_output(STEPS, tensors)

    def answer(q: Any, k: Any, v: Any, ends: Any, most: int, lens: Any, table: Any, causal: bool) -> Any:
        given = {"block_table": table, "seqused_k": lens, "causal": causal}
        return reference.attention_varlen(q, k, v, ends, max_seqlen_q=most, **given)

    def flash_attn_with_kvcache(
        q: Any,
        k: Any,
        v: Any,
        *,
        cache_seqlens: Any,
        page_table: Any,
        cu_seqlens_q: Any,
        max_seqlen_q: int,
        causal: bool,
    ) -> Any:
        return answer(q, k, v, cu_seqlens_q, max_seqlen_q, cache_seqlens, page_table, causal)

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = None, max_seqlen_q: int = 0,
        max_seqlen_k: int = 0, seqused_k: Any = None, page_table: Any = None, causal: bool = False,
    ) -> Any:  # fmt: skip
        assert cu_seqlens_k is None
        return answer(q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, page_table, causal), None

    for name, functions in (
        ("fa3", {"flash_attn_with_kvcache": flash_attn_with_kvcache}),
        ("fa4", {"flash_attn_varlen_func": flash_attn_varlen_func}),
    ):
        impl = calls_of(name, monkeypatch, **functions)
        assert impl.unsupported(STEPS) is None
        assert varlen.why_wrong(impl.prepare(STEPS, tensors), expected) is None
    assert "flash_attn_varlen_func" in str(calls_of("fa3", monkeypatch).unsupported(CHUNKS))


@pytest.mark.parametrize("pack", [SELF, small("bwd-" + SELF.workload.key[4:])], ids=["forward", "both"])
def test_calls_are_recorded_where_their_tensors_are_made(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time is no part of a row: a call that cannot be recorded needs a host that a queue hides, or has no row."""
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(varlen, "SETTLE_S", 0.0)
    gpu = FakeGpu()

    def impl(name: str, *, host_ms: float, can_be_captured: bool) -> VarlenImpl:
        def prepare(pack: Pack, tensors: PackTensors) -> Ready:
            assert gpu.on_side_stream  # else autograd runs a backward op where nothing is recorded
            ready = IMPLS[0].prepare(pack, tensors)

            def run(n: int) -> object:
                gpu.call(name, 0.25, host_ms, can_be_captured=can_be_captured)
                return ready.call.run(n)

            return replace(ready, call=Call(run=run))

        return replace(IMPLS[0], name=name, prepare=prepare)

    impls = [
        impl("slow host", host_ms=0.75, can_be_captured=True),
        impl("queued", host_ms=0.0625, can_be_captured=False),
        impl("host alone", host_ms=0.75, can_be_captured=False),
    ]
    found = {each.name: result for each, result in varlen.race(pack, impls, gpu, where=CPU, window_ms=1.0, rounds=2)}
    assert found["slow host"] == Timed(ms=0.25, timing="graph")
    queued = found["queued"]
    assert isinstance(queued, Timed)
    assert (queued.ms, queued.timing) == (0.25, "queue")
    assert "is capturing" in varlen.line_of(pack, impls[1], queued)
    assert "the host takes 0.750 ms" in str(found["host alone"])


@UNFUSED
def test_flex_races_as_the_variant_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    impl = next(impl for impl in varlen_impls.with_flex(IMPLS, "triton") if impl.name == "flex")
    assert varlen_impls.with_flex(IMPLS, "default") == IMPLS
    tensors = tensors_of(SELF, CPU)
    expected, entered = varlen.last_output(SELF, tensors), []

    def enter(each: VarlenImpl) -> str | int:
        entered.append(each)
        return varlen.why_wrong(each.prepare(SELF, tensors), expected) or len(entered)

    found = fastest(impl, SELF, enter, lambda _, made: 10.0 - made)
    names = [each.version().removeprefix(torch.__version__).strip() for each in entered]
    assert names == ["TMA 64x64 3s 4w", "TMA 64x64 3s 4w mask 64x64", "TMA 128x64 3s 8w", ""]
    assert (found.impl, found.impl.name, found.made) == (entered[-1], "flex", 4)
    assert "cannot" in str(varlen_impls._why_not_flash(SELF))


def test_peers_say_what_they_lack() -> None:
    reasons = {impl.name: impl.unsupported(CHUNKS) for impl in IMPLS}
    assert reasons["flashgen"] is None
    assert "each length" in str(reasons["sdpa-padded"])
    assert "as many keys" in str(reasons["flex"])
    assert "installed" in str(reasons["fa3"])


def test_a_row_counts_the_pairs_that_are_seen() -> None:
    found = Timed(ms=0.5, timing="graph")
    row = varlen.row_of(SELF, IMPLS[0], found, SHARED)
    assert (row.suite, row.workload, row.data, row.timing) == ("varlen", SELF.workload.key, "ramp", "graph")
    assert row.tflops == SELF.workload.flops / 0.5 / 1e9
    both = small("bwd-" + SELF.workload.key[4:])
    assert both.flops == 3.5 * SELF.flops
    assert "0.5000 ms" in varlen.line_of(SELF, IMPLS[0], found)
    found = Timed(ms=0.001, timing="graph")
    title, text, table = varlen_parts([varlen.row_of(SELF, impl, found, SHARED) for impl in IMPLS[:2]])
    assert title == "### Packed sequences, forward pass"
    assert "as no work" in text
    assert table.splitlines()[2] == "| 3, 40 | ramp to 30 | 4/2 | 16 | yes | 0 | 0 |"
    assert varlen_parts([]) == []
    title, _, table = varlen_parts([varlen.row_of(STEPS, IMPLS[0], found, SHARED)])
    assert title == "### Packed sequences, over pages"
    assert table.splitlines()[2] == "| 4, 12 over 120 in pages of 16 | mixed to 10 | 4/2 | 16 | yes | 0 |"
    masked = next(impl for impl in IMPLS if impl.name == "flashgen-mask")
    assert "hide other documents" in varlen_parts([varlen.row_of(SELF, masked, found, SHARED)])[1]
