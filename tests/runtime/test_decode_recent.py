"""Repeated calls of `flashgen.attention_decode`: found without a key, unless anything about them has changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.launch import decode_plan
from flashgen.runtime.decode import plans, recent, runs
from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.ops import recent as ops_recent
from tests.decoding import Case, arguments, make
from tests.fakes.driver import FakeDriver, Launched
from tests.runtime.decode_calls import GOOD, RULES, broken, run

PAGED = Case(lens=(300, 0, 64), page=16)


@pytest.fixture
def no_key(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which a call that makes a key fails."""

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(runs, "_launch", lambda *_: pytest.fail("it makes a key"))
            yield

    return context


@pytest.mark.parametrize(
    "case",
    [
        Case(lens=(300, 2)),
        Case(lens=(300, 2), page=16, sinks=True, alibi=True, options={"window": (100, 0), "causal": True}),
        Case(lens=(300, 200), leftpad=(3, 9), alibi=True, options={"softcap": 3.0, "softmax_scale": 0.5}),
        Case(lens=(300, 200), batch_idx=(1, 0), sinks=True, options={"fixed_split_size": 128}),
    ],
    ids=["contiguous", "paged", "padded", "rows"],
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_repeated_call_makes_no_key_and_both_kernels_read_it(
    driver: FakeDriver,
    no_key: Any,
    case: Case,
    return_lse: bool,
) -> None:
    first, second = run(driver, replace(make(case), return_lse=return_lse))
    call = replace(make(case, seed=3), return_lse=return_lse)
    with no_key():
        again, merge = run(driver, call)
    given = {"Q": call.q, "K": call.k_cache, "V": call.v_cache, "Lens": call.seqlens, "Table": call.block_table}
    given |= {"Leftpad": call.leftpad, "BatchIdx": call.batch_idx}
    given |= {"Sinks": call.features.sinks, "AlibiSlopes": call.features.alibi_slopes}
    pointers = {name: 0 if one is None else one.data_ptr() for name, one in given.items()}
    for read, expected in ((again, first.values), (merge, second.values)):
        known = {name: pointer for name, pointer in pointers.items() if name in expected}
        changed = {"O", "LSE"} & expected.keys()
        assert {name: value for name, value in read.values.items() if name not in changed} == {
            name: value for name, value in {**expected, **known}.items() if name not in changed
        }
        assert all(bool(read.values[name]) == (name == "O" or return_lse) for name in changed)
    assert (again.grid, merge.grid, again.attributes, merge.attributes) == (
        first.grid,
        second.grid,
        first.attributes,
        second.attributes,
    )


def test_outputs_are_laid_out_as_those_of_the_first_call(driver: FakeDriver, no_key: Any) -> None:
    call = make(Case(lens=(300, 2), page=16, seqlen_q=3))
    for q in (call.q, call.q.transpose(1, 2).contiguous().transpose(1, 2)):
        given = replace(call, q=q, return_lse=True)
        run(driver, given)
        runs.forget()
        tensors, named = arguments(given)
        first = flashgen.attention_decode(*tensors, **named)
        with no_key():
            again = flashgen.attention_decode(*tensors, **named)
        for one, other in zip(first, again, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.data_ptr() != other.data_ptr()


def test_a_tensor_that_was_changed_in_place_is_another_one(driver: FakeDriver) -> None:
    call = make(PAGED)
    run(driver, call)
    call.k_cache.as_strided_(call.k_cache.shape, [*call.k_cache.stride()[:2], 0, 1])
    assert run(driver, call)[0].values["stride_kh"] == 0
    other = call.q.clone()
    call.q.set_(other)  # type: ignore[call-overload]
    assert run(driver, call)[0].values["Q"] == other.data_ptr()
    call.q.requires_grad_()
    with pytest.raises(UnsupportedError, match="no backward pass"):
        run(driver, call)
    with torch.no_grad():
        assert run(driver, call)
    call.q.requires_grad_(False)
    assert run(driver, call)
    call.seqlens.data = call.seqlens.long()
    with pytest.raises(WorkloadError, match="seqlens is int32"):
        run(driver, call)


def test_an_address_that_is_no_multiple_of_16_bytes_has_kernels_of_its_own(driver: FakeDriver) -> None:
    call = make(PAGED)
    run(driver, call)
    odd = torch.empty(call.q.numel() + 1, dtype=call.q.dtype)[1:].view(call.q.shape)
    (first, _) = run(driver, replace(call, q=odd))
    assert first.values["Q"] == odd.data_ptr()
    assert len(runs.MEMO) == len(plans.PLANS) == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_call_that_breaks_a_rule_is_refused_after_a_good_one(driver: FakeDriver, rule: str) -> None:
    for case in (GOOD, Case(lens=GOOD.lens)):
        run(driver, make(case))
    tensors, named = arguments(broken(rule))
    with pytest.raises(FlashgenError, match=rule):
        flashgen.attention_decode(*tensors, **named)


def test_no_tensor_is_kept(driver: FakeDriver) -> None:
    call = make(replace(PAGED, sinks=True))
    run(driver, call)
    run(driver, call)
    tensors = [weakref.ref(one) for one in (call.q, call.k_cache, call.seqlens, call.block_table, call.features.sinks)]
    del call
    gc.collect()
    assert [one() for one in tensors] == [None] * 5


def test_streams_have_memory_of_their_own(
    driver: FakeDriver,
    no_key: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, seen, current = make(PAGED), {}, [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0])
    run(driver, call)
    for stream in (7, 9, 7, 0, 9):
        current[0] = stream
        with no_key():
            first, second = run(driver, call)
        assert {first.stream, second.stream} == {stream}
        assert first.values["PartO"] == second.values["PartO"] == seen.setdefault(stream, first.values["PartO"])
    assert len(set(seen.values())) == 3


def test_memory_that_has_grown_is_that_of_all_calls(driver: FakeDriver, no_key: Any) -> None:
    small = make(replace(PAGED, head_dim=64))
    large = make(Case(lens=(2000, 4), nheads=64, nheads_k=32, page=16, head_dim=64))
    (before, _), (grown, _) = run(driver, small), run(driver, large)
    assert before.values["PartO"] != grown.values["PartO"]
    with no_key():
        first, second = run(driver, small)
    assert first.values["PartO"] == second.values["PartO"] == grown.values["PartO"]
    assert second.values["PartLse"] == before.values["PartLse"] - before.values["PartO"] + grown.values["PartO"]


def test_a_capture_gets_memory_of_its_own_each_time(
    driver: FakeDriver,
    no_key: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, made, current = make(PAGED), [], [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0])
    (shared, _) = run(driver, call)
    new = decode_plan.Pieces.new
    monkeypatch.setattr(decode_plan.Pieces, "new", lambda self, beside: made.append(new(self, beside)) or made[-1])
    with monkeypatch.context() as patch, no_key():
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = [run(driver, call)[0].values["PartO"] for _ in range(2)]
    assert captured == [start for _, start in made]
    assert shared.values["PartO"] not in captured
    with no_key():
        assert run(driver, call)[0].values["PartO"] == shared.values["PartO"]
    assert len(made) == 2
    current[0] = 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("it asks what cannot be"))
    run(driver, call)


def test_another_current_gpu_is_left_for_the_launch(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    current = [-1]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        current[0], before = index, current[0]
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    call = make(PAGED)
    run(driver, call)
    assert not entered
    monkeypatch.setattr(torch.cuda, "device", device)
    current[0] = 1
    for _ in range(3):
        assert len(run(driver, call)) == 2
    assert entered == [-1] * 3  # tensors of the CPU have no other index
    assert [len(found) for found in recent.RECENT.values()] == [1]


def test_modes_of_torch_are_told_apart(driver: FakeDriver, no_key: Any) -> None:
    call = make(PAGED)
    for _ in range(2):
        run(driver, call)
        with torch.inference_mode():
            run(driver, call)
    with no_key():
        run(driver, call)
        with torch.inference_mode():
            run(driver, call)
    assert len(runs.MEMO) == 1


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_a_gradient_is_refused_behind_a_call_without_one(name: str, driver: FakeDriver) -> None:
    """A model that is evaluated first and trained afterwards."""
    call = make(Case(lens=(40, 7), page=16))
    learned = torch.zeros(call.q.shape[2], requires_grad=True)
    learns = replace(call, features=replace(call.features, **{name: learned}))
    with torch.no_grad():
        for _ in range(3):
            assert run(driver, learns)
    with pytest.raises(UnsupportedError, match="no backward pass"):
        run(driver, learns)
    with torch.no_grad():
        assert run(driver, learns)


@pytest.mark.parametrize("name", ["seqlens", "block_table", "sinks", "alibi_slopes", "leftpad", "batch_idx"])
def test_one_tensor_of_another_class_takes_the_op(name: str, driver: FakeDriver) -> None:
    """A kernel would be launched with the address 0 of a FakeTensor or a DTensor, which torch refuses beside others."""
    rows = {"leftpad": torch.zeros(2).int(), "batch_idx": torch.arange(2).int()}
    call = make(Case(lens=(40, 7), page=None if name in rows else 16, sinks=True, alibi=True))
    call = replace(call, **{name: rows[name]}) if name in rows else call
    launched = len(run(driver, call)) + len(run(driver, call))
    tensors, named = arguments(call)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(tensors[3] if name == "seqlens" else named[name])
    given = [*tensors[:3], fake] if name == "seqlens" else tensors
    with pytest.raises(Exception, match=r"[Ff]ake"):
        flashgen.attention_decode(*given, **(named if name == "seqlens" else named | {name: fake}))
    assert len(driver.launches) == launched


def test_tensors_without_data_take_the_op(driver: FakeDriver) -> None:
    call = make(PAGED)
    launched = len(run(driver, call)) + len(run(driver, call))
    tensors, named = arguments(call)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        options = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in named.items()}
        assert flashgen.attention_decode(*fakes, **options).shape == call.q.shape
    assert len(driver.launches) == launched


def test_layouts_in_turn_are_all_found(driver: FakeDriver, no_key: Any) -> None:
    calls = [make(Case(lens=(300,) * batch, page=16)) for batch in range(1, recent.MOST_LAYOUTS + 1)]
    for call in calls:
        run(driver, call)
    with no_key():
        for call in calls:
            run(driver, call)
    more = make(Case(lens=(300,) * 9, page=16))
    for _ in range(2):
        for call in (*calls, more):
            assert run(driver, call)[0].values["batch"] == call.q.shape[0]
    (found,) = recent.RECENT.values()
    assert len(found) == recent.MOST_LAYOUTS
    assert len(runs.MEMO) == len(calls) + 1


def test_shapes_of_one_plan_in_turn_are_launched_as_if_alone(driver: FakeDriver, no_key: Any) -> None:
    calls = [make(Case(lens=(room, 3), room=room)) for room in (64, 65, 300)]
    first = [run(driver, call) for call in calls]
    assert [len(launches) for launches in first] == [1, 2, 2]
    assert len(plans.PLANS) == 1
    with no_key():
        again = [run(driver, call) for call in calls]
    for before, after in zip(first, again, strict=True):
        for one, other in zip(before, after, strict=True):
            same = one.values.keys() - {"O", "PartO", "PartLse"}
            assert {name: one.values[name] for name in same} == {name: other.values[name] for name in same}
            assert (one.grid, one.block, one.attributes) == (other.grid, other.block, other.attributes)


def test_one_cache_of_keys_and_values_is_served(driver: FakeDriver) -> None:
    call = make(PAGED)
    for _ in range(2):
        (first, _) = run(driver, replace(call, v_cache=call.k_cache))
        assert first.values["V"] == first.values["K"] == call.k_cache.data_ptr()


def test_without_the_parts_of_torch_that_it_uses_keys_are_made(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops_recent, "_QUESTION", None)
    for seed in (0, 1):
        call = make(PAGED, seed=seed)
        assert run(driver, call)[0].values["Q"] == call.q.data_ptr()
    assert not recent.RECENT


def test_reload_forgets_and_checks_of_contents_are_asked_for_anew(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call: DecodeCall = make(PAGED)
    run(driver, call)
    assert recent.RECENT
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    flashgen.reload()
    assert not recent.RECENT
    assert not runs.MEMO
    for _ in range(2):
        with pytest.raises(WorkloadError, match="seqlens are 0 to"):
            run(driver, replace(call, seqlens=torch.full_like(call.seqlens, 4000)))
    assert not recent.RECENT
    settings.cache_clear()


def test_reload_while_a_thread_prepares_a_step_forgets_what_that_prepares(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with other calls, no record of then is remembered behind it."""
    real, threads = runs._prepared, list[threading.Thread]()

    def prepared(*given: Any) -> Any:
        found = real(*given)
        threads.append(threading.Thread(target=flashgen.reload))
        threads[-1].start()
        threads[-1].join(0.2)  # what is not held back is done by then
        return found

    monkeypatch.setattr(runs, "_prepared", prepared)
    run(driver, make(PAGED))
    threads[0].join()
    assert (runs.MEMO, recent.RECENT, runs.OPEN) == ({}, {}, {})


def test_reload_while_a_step_is_launched_forgets_it(driver: FakeDriver) -> None:
    class Reloading(list[Launched]):
        def append(self, one: Launched) -> None:
            super().append(one)
            flashgen.reload()

    driver.launches = Reloading()
    run(driver, make(PAGED))
    assert (runs.MEMO, recent.RECENT, runs.OPEN) == ({}, {}, {})


def test_reload_while_a_step_of_other_sizes_is_launched_forgets_it(driver: FakeDriver) -> None:
    class Reloading(list[Launched]):
        def append(self, one: Launched) -> None:
            super().append(one)
            flashgen.reload()

    calls = [make(Case(lens=(300,) * batch)) for batch in (1, 2, 3)]
    for call in calls:
        run(driver, call)
    assert len(runs.MEMO) == 1  # the others are new sizes of its kind
    driver.launches = Reloading()
    run(driver, calls[1])
    assert (runs.MEMO, recent.RECENT, runs.OPEN) == ({}, {}, {})
