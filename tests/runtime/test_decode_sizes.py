"""Calls of `flashgen.attention_decode` with new sizes: launched as the slow path would, and refused as it would."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features
from flashgen.runtime.decode import call as calls
from flashgen.runtime.decode import open_calls, runs
from flashgen.runtime.decode.call import DecodeCall
from tests.decoding import Case, make
from tests.fakes.driver import FakeDriver, Launched
from tests.runtime.decode_calls import run
from tests.tiers import every

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "contiguous": ({}, {"causal": True}),
    "paged": ({"page": 16}, {}),
    "window and sinks": ({"page": 16, "sinks": True}, {"window": (100, 0)}),
    "softcap, slopes and an LSE": ({"page": 64, "alibi": True, "seqlen_q": 3}, {"softcap": 2.0}),
    "fixed splits": ({"page": 16}, {"fixed_split_size": 128}),
    "left padding": ({"leftpad": True}, {}),
    "rows": ({"batch_idx": True, "sinks": True}, {"softmax_scale": 0.5}),
    "halves": ({"layout": "halves"}, {}),
    "heads before slots": ({"layout": "hnd"}, {}),
}


def call_of(kind: str, batch: int, keys: int, seed: int) -> DecodeCall:
    """A call of a kind with these sizes."""
    case, options = KINDS[kind]
    case = dict(case)
    if case.pop("leftpad", False):
        case["leftpad"] = (1,) * batch
    if case.pop("batch_idx", False):
        case["batch_idx"] = tuple(reversed(range(batch)))
    call = make(Case(lens=(keys,) * batch, options=options, **case), seed=seed)
    if call.block_table is not None:  # the pages of an engine are as many as ever
        pool = torch.zeros(2, 4000, *call.k_cache.shape[1:], dtype=call.q.dtype)
        call = replace(call, k_cache=pool[0], v_cache=pool[1])
    return replace(call, return_lse="LSE" in kind)


def without_pointers(launches: list[Launched]) -> list[Any]:
    """What launches read beside tensors, whose addresses differ."""
    found = []
    for one in launches:
        base = one.values["PartO"]
        numbers = {name: value for name, value in one.values.items() if not name[0].isupper()}
        found.append(
            (numbers, one.values["PartLse"] - base, one.grid, one.block, one.shared_bytes, one.function, one.attributes)
        )
    return found


@pytest.mark.parametrize("kind", every(3, KINDS))
def test_new_sizes_are_launched_as_if_they_were_the_first(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    draw = random.Random(kind)
    sizes = [(draw.randint(1, 40), draw.randint(1, 900)) for _ in range(12)]
    expected = []
    for seed, (batch, keys) in enumerate(sizes):
        runs.forget()
        expected.append(without_pointers(run(driver, call_of(kind, batch, keys, seed))))
    runs.forget()
    run(driver, call_of(kind, 7, 300, 0))
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_launch", lambda *_: pytest.fail("it takes the slow path"))
        for seed, (batch, keys) in enumerate(sizes):
            call = call_of(kind, batch, keys, seed)
            for _ in range(3):  # new, known, and without a look at its sizes
                launches = run(driver, call)
                assert without_pointers(launches) == expected[seed], sizes[seed]
                for name, tensor in {"Q": call.q, "K": call.k_cache, "Lens": call.seqlens}.items():
                    assert launches[0].values[name] == tensor.data_ptr()
    assert len(runs.MEMO) == 1


def test_sizes_that_break_a_rule_are_refused_as_ever(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, plain = make(Case(lens=(40, 7, 9), page=16)), make(Case(lens=(40, 7, 9)))
    assert paged.block_table is not None
    for call in (paged, plain, paged, plain):
        run(driver, call)
    broken = [
        replace(paged, seqlens=paged.seqlens[:2]),
        replace(paged, block_table=paged.block_table[:2]),
        replace(paged, q=paged.q[:2]),
        replace(plain, k_cache=plain.k_cache[:2]),
        replace(plain, v_cache=plain.v_cache[:, :8]),
        replace(plain, k_cache=plain.k_cache[:2], v_cache=plain.v_cache[:2]),
        replace(plain, seqlens=plain.seqlens[:1]),
        replace(paged, block_table=paged.block_table.repeat(1, 2)[:, ::2]),
    ]
    for call in broken:
        with pytest.raises(WorkloadError):
            run(driver, call)
    monkeypatch.setattr(open_calls, "MAX_KEYS", 64)
    monkeypatch.setattr(calls, "MAX_KEYS", 64)
    with pytest.raises(WorkloadError, match="at most 64 keys"):
        run(driver, make(Case(lens=(70, 2), page=16)))


def test_sizes_that_other_rules_serve_take_the_slow_path(driver: FakeDriver) -> None:
    for page in (None, 16):
        call = make(Case(lens=(40, 7, 9), page=page))
        run(driver, call)
        odd = torch.empty(call.q.numel() + 1, dtype=call.q.dtype)[1:].view(call.q.shape)[:2]
        table = None if call.block_table is None else call.block_table[:2]
        caches = (call.k_cache, call.v_cache) if table is not None else (call.k_cache[:2], call.v_cache[:2])
        part = replace(call, q=odd, seqlens=call.seqlens[:2], block_table=table, k_cache=caches[0], v_cache=caches[1])
        (first, *_) = run(driver, part)
        assert first.values["Q"] == odd.data_ptr()
        empty = make(Case(lens=(3, 4), page=page))
        table = None if empty.block_table is None else empty.block_table[:, :0]
        caches = (empty.k_cache, empty.v_cache) if page else (empty.k_cache[:, :0], empty.v_cache[:, :0])
        assert run(driver, replace(empty, block_table=table, k_cache=caches[0], v_cache=caches[1])) == []


def test_batches_of_several_launches_are_not_taken_for_one(driver: FakeDriver) -> None:
    for batch in (5, 1025):
        call = make(Case(lens=(20,) * batch, room=300, head_dim=16, nheads=1, nheads_k=1))
        lens = [one.values["Lens"] for one in run(driver, call) if "K" in one.values]
        assert lens == [call.seqlens[start].data_ptr() for start in range(0, batch, 1024)]


def test_slopes_of_each_sequence_take_the_slow_path(driver: FakeDriver) -> None:
    for batch in (3, 5):
        call = make(Case(lens=(40,) * batch, page=16))
        slopes = torch.ones(batch, call.q.shape[2])
        (first, *_) = run(driver, replace(call, features=Features(alibi_slopes=slopes)))
        assert first.values["stride_alibi_b"] == call.q.shape[2]
    assert not open_calls.OPEN
