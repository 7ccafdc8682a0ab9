"""Races on a fake clock, and the implementations that run on a CPU against the float64 oracle."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import fa2, fa4, flex, impls
from benchmarks.forward import line_of
from benchmarks.impls import IMPLS, Call, Impl
from benchmarks.problems import last_heads, problem
from benchmarks.race import by_load, in_turns, race, there_and_back
from flashgen.core.device import CATALOGUE
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure.baselines import SAME_FUNCTION
from flashgen.measure.data_kinds import DATA_KINDS, HARD_KINDS, NORMAL
from flashgen.measure.feature_inputs import SOFTCAP
from flashgen.measure.inputs import make_inputs
from flashgen.measure.reference import oracle
from flashgen.measure.timing import make_unit
from flashgen.measure.turns import orders
from tests.benchmarks.races import CPU, FEATURES, PACE, SQUARE, FakeGpu, close, fake_module, impl_of, raced
from tests.tiers import first

SHAPES = [
    SQUARE,
    replace(SQUARE, causal=False),
    Workload(batch=1, nheads=4, nheads_k=2, seqlen_q=40, seqlen_k=70, head_dim=32, causal=True),
]


def test_turns_are_balanced_and_windows_sustained() -> None:
    gpu = FakeGpu()
    names = ["a", "b", "c"]
    results = raced(gpu, *(impl_of(gpu, name, 3.0 + i / 4) for i, name in enumerate(names)))
    assert [name for name, _, _ in gpu.visits] == [names[i] for turn in there_and_back(3, PACE.rounds) for i in turn]
    assert all(warm >= 8.0 and window >= 16.0 for _, warm, window in gpu.visits)
    assert [result.median_ms for result in results] == pytest.approx([3.0, 3.25, 3.5])
    assert {len(result.windows) for result in results} == {PACE.rounds}


@pytest.mark.parametrize("count", range(1, 8))
def test_everybody_is_around_the_middle_of_a_race(count: int) -> None:
    for rounds in (2, 4, 6):
        found = there_and_back(count, rounds)
        assert len(found) == rounds
        assert all(sorted(order) == list(range(count)) for order in found)
        flat = [index for order in found for index in order]
        places = [[place for place, index in enumerate(flat) if index == one] for one in range(count)]
        assert {statistics.median(each) for each in places} == {(len(flat) - 1) / 2}
        assert {statistics.mean(each) for each in places} == {(len(flat) - 1) / 2}
        followed = Counter(itertools.pairwise(flat))
        assert all(followed[two, one] == number for (one, two), number in followed.items())
        assert found[: rounds // 2] == orders(count, rounds // 2), "who follows whom is balanced as well"
    assert there_and_back(count, 3)[::2] == (orders(count, 1)[0], orders(count, 1)[0][::-1])


class DriftingGpu(FakeGpu):
    """Each window takes 1% of the first one longer than the one before."""

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        return super().elapsed_ms(warm, measured) * (1 + 0.01 * len(self.visits))


def test_a_card_that_becomes_slower_is_so_for_everybody() -> None:
    for names in ("ab", "abc", "abcdef"):
        gpu = DriftingGpu()
        times = [result.median_ms for result in raced(gpu, *(impl_of(gpu, name, 3.0) for name in names))]
        assert max(times) / min(times) < 1.0001
    units = [make_unit(partial(gpu.call, name, 3.0), 1, gpu, graph_below_ms=0.0) for name in "ab"]
    windows = in_turns(units, gpu, rounds=2, warm_ms=10.0, window_ms=20.0)
    first, second = (statistics.median(window.ms for window in each) for each in windows)
    assert first == pytest.approx(second)


def test_slow_implementations_take_turns_behind_the_others() -> None:
    """They draw less power, and whoever has the next turn a higher clock."""
    gpu = FakeGpu()
    took = {"half": 6.0, "a": 3.0, "eighth": 24.0, "b": 3.5}
    pace = replace(PACE, settle_ms=300.0)
    entrants = [impl_of(gpu, name, ms) for name, ms in took.items()]
    results = race(SQUARE, entrants, device=CATALOGUE[0], where=CPU, stopwatch=gpu, pace=pace)
    assert {result.impl.name: result.median_ms for result in results} == pytest.approx(took)
    visited = [name for name, _, _ in gpu.visits]
    assert set(visited[: 2 * PACE.rounds]) == {"a", "b"}
    assert visited[2 * PACE.rounds :] == ["half"] * PACE.rounds + ["eighth"] * PACE.rounds
    assert {visited.count(name) for name in took} == {PACE.rounds}
    assert by_load([]) == ()
    assert by_load([2.5, 2.0]) == ((0, 1),)
    assert by_load([9.0, 2.0, 3.0, 2.25, 2.75]) == ((1, 3), (2, 4), (0,))


def test_a_race_begins_with_load_that_is_in_no_window() -> None:
    took = []
    for settle_ms in (0.0, 300.0):
        gpu = FakeGpu()
        pace = replace(PACE, settle_ms=settle_ms)
        one = impl_of(gpu, "one", 3.0)
        (result,) = race(SQUARE, [one], device=CATALOGUE[0], where=CPU, stopwatch=gpu, pace=pace)
        assert [window.ms for window in result.windows] == pytest.approx([3.0] * PACE.rounds)
        took.append(gpu.now_ms)
    assert took[1] - took[0] == pytest.approx(300.0)


def test_a_slow_implementation_gets_shorter_windows() -> None:
    gpu = FakeGpu()
    raced(gpu, impl_of(gpu, "fast", 2.5), impl_of(gpu, "slow", 2.5, share=0.5))
    assert {(name, warm, window) for name, warm, window in gpu.visits} == {("fast", 10.0, 20.0), ("slow", 5.0, 10.0)}


# what a host costs on both sides of what the kernel takes, which are the rules that differ
@pytest.mark.parametrize(
    ("ms", "host_ms"), first(2, [(0.008, 0.9), (0.15, 0.1), (0.05, 0.0), (0.05, 0.1), (0.8, 0.0), (0.8, 0.9)])
)
def test_every_short_call_is_timed_from_a_graph_whatever_its_host_costs(ms: float, host_ms: float) -> None:
    """FlashAttention-3 and -4 cost the host 0.1 ms a call: what a queue shows of a shorter kernel is the host."""
    gpu = FakeGpu()
    quick, slow = raced(gpu, impl_of(gpu, "quick", ms), impl_of(gpu, "slow", ms, host_ms=host_ms))
    assert (quick.timing, slow.timing) == ("graph", "graph")
    assert slow.median_ms == pytest.approx(quick.median_ms)
    assert quick.median_ms == pytest.approx(ms)


def test_a_long_call_is_queued() -> None:
    gpu = FakeGpu()
    (result,) = raced(gpu, impl_of(gpu, "long", 5.0, host_ms=1.0))
    assert (result.timing, result.queued_because, result.reason) == ("queue", None, None)
    assert result.median_ms == pytest.approx(5.0)


def test_a_call_that_cannot_be_captured_is_queued_and_says_so() -> None:
    gpu = FakeGpu()
    result, other = raced(
        gpu, impl_of(gpu, "reads back", 1.0, host_ms=0.1, can_be_captured=False), impl_of(gpu, "other", 1.0)
    )
    assert (result.timing, other.timing) == ("queue", "graph")
    assert result.median_ms == pytest.approx(1.0)
    assert result.queued_because == (
        "it cannot be recorded into a CUDA graph (RuntimeError: operation not permitted when stream is capturing)"
    )
    assert result.queued_because in line_of(SQUARE, result)
    assert "graph" in line_of(SQUARE, other)


@pytest.mark.parametrize("ms", first(1, [0.05, 0.15]))
def test_no_row_shows_the_time_of_a_host(ms: float) -> None:
    gpu = FakeGpu()
    (result,) = raced(gpu, impl_of(gpu, "slow", ms, host_ms=0.1, can_be_captured=False))
    assert not result.windows
    assert result.reason is not None
    assert "it cannot be recorded into a CUDA graph" in result.reason
    assert "the host takes 0.100 ms to launch a call of" in result.reason


def test_wrong_failing_and_refusing_implementations_get_reasons_and_the_others_times() -> None:
    gpu = FakeGpu()
    refusing = replace(impl_of(gpu, "refusing", 3.0), unsupported=lambda workload: "not today")
    results = raced(
        gpu,
        impl_of(gpu, "good", 3.0),
        impl_of(gpu, "wrong", 3.0, error=0.1),
        impl_of(gpu, "nan", 3.0, error=float("nan")),
        impl_of(gpu, "broken", 3.0, fail_at=1),
        impl_of(gpu, "breaks", 3.0, fail_at=40),
        refusing,
    )
    reasons = {result.impl.name: result.reason for result in results}
    assert reasons.pop("good") is None
    assert reasons == {
        "wrong": "it computes something else (relative error 0.1)",
        "nan": "its output is not finite everywhere",
        "broken": "RuntimeError: it broke",
        "breaks": "RuntimeError: it broke",
        "refusing": "not today",
    }
    assert len(results[0].windows) == PACE.rounds
    assert all(not result.windows for result in results[1:])


def without_mask(gpu: FakeGpu) -> Impl:
    """Right but for the causal mask."""
    impl = impl_of(gpu, "without mask", 3.0)
    return replace(impl, prepare=lambda workload, inputs: impl.prepare(replace(workload, causal=False), inputs))


@pytest.mark.parametrize("data", first(2, DATA_KINDS))
def test_a_forgotten_mask_is_seen_on_every_kind_of_data(data: str) -> None:
    """Also where one key takes nearly all of the weight, so that in most rows a mask changes nothing."""
    gpu = FakeGpu()
    good, wrong = raced(gpu, impl_of(gpu, "good", 3.0), without_mask(gpu), data=data)
    assert good.reason is None
    assert wrong.reason is not None
    assert "it computes something else" in wrong.reason


def test_inputs_are_of_the_kind_of_data() -> None:
    tasks = {name: problem(SQUARE, copies=1, where=CPU, data=name) for name in DATA_KINDS}
    assert not torch.equal(tasks["rising"].inputs.k[0], tasks[NORMAL].inputs.k[0])
    assert torch.equal(tasks["std8"].inputs.q[0], 8 * tasks[NORMAL].inputs.q[0])
    assert [name for name, task in tasks.items() if task.every_row] == list(HARD_KINDS)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("data", DATA_KINDS)
def test_rounding_is_far_from_another_function_on_every_kind_of_data(data: str, dtype: str) -> None:
    workload = Workload(batch=1, nheads=2, seqlen_q=512, head_dim=64, causal=True, dtype=dtype)
    task = problem(workload, copies=1, where=CPU, data=data)
    q, k, v = (group[0] for group in (task.inputs.q, task.inputs.k, task.inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert 0 < replace(task, every_row=True).distance(out, task.expected[0]) < SAME_FUNCTION / 10


def test_one_wrong_row_is_seen_on_hard_data() -> None:
    task = problem(SQUARE, copies=1, where=CPU, data="peak")
    (right,) = task.expected
    out = right.repeat(1, SQUARE.nheads, 1, 1)
    out[0, -1, 7] *= 0.9
    assert task.distance(out, right) == pytest.approx(0.1)
    assert replace(task, every_row=False).distance(out, right) < SAME_FUNCTION


@pytest.mark.parametrize("workload", SHAPES, ids=lambda w: w.key)
def test_standard_attention_is_attention(workload: Workload) -> None:
    inputs = make_inputs(workload, copies=2, seed=1, device=CPU)
    standard = next(impl for impl in IMPLS if impl.name == "standard")
    assert standard.unsupported(workload) is None
    close(standard.prepare(workload, inputs), workload, inputs)


@pytest.mark.parametrize("workload", first(1, SHAPES), ids=lambda w: w.key)
def test_flex_is_given_the_right_mask(workload: Workload) -> None:
    inputs = make_inputs(workload, copies=2, seed=1, device=CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks to be compiled, which takes a C++ compiler and a minute here
        close(Call(run=flex.flex_call(flex.attend, workload, inputs)), workload, inputs)


@pytest.mark.parametrize("workload", first(1, FEATURES), ids=lambda w: w.key)
def test_flex_computes_every_feature(workload: Workload) -> None:
    inputs = make_inputs(workload, copies=2, seed=1, device=CPU)
    inputs = replace(inputs, features=(inputs.features[0],) * 2)  # FlexAttention's functions are made for one set
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(Call(run=flex.flex_call(flex.attend, workload, inputs)), workload, inputs)


@pytest.mark.parametrize("workload", [w for w in FEATURES if not (w.softcap or w.sink)], ids=lambda w: w.key)
def test_sdpa_gets_everything_in_one_mask(workload: Workload) -> None:
    inputs = make_inputs(workload, copies=2, seed=1, device=CPU)
    inputs = replace(inputs, features=(inputs.features[0],) * 2)
    masked = next(impl for impl in IMPLS if impl.name == "sdpa-masked")
    assert masked.unsupported(workload) is None
    call = masked.prepare(workload, inputs)
    close(call, workload, inputs)
    given = bool(workload.bias or workload.mask) and not (workload.causal or workload.window_left is not None)
    assert (call.held_bytes == 0) == given


def test_one_mask_is_no_way_to_a_softcap() -> None:
    masked = next(impl for impl in IMPLS if impl.name == "sdpa-masked")
    assert masked.unsupported(SQUARE) == "there is nothing that needs a mask"
    assert masked.unsupported(replace(SQUARE, softcap=True)) is not None
    assert masked.unsupported(replace(SQUARE, sink=True, window_left=3)) is not None


@pytest.mark.parametrize("workload", FEATURES, ids=lambda w: w.key)
def test_the_last_head_alone_has_the_features_of_the_last_head(workload: Workload) -> None:
    inputs = make_inputs(workload, copies=1, seed=1, device=CPU)
    q, k, v, features = inputs.q[0], inputs.k[0], inputs.v[0], inputs.features[0]
    whole = oracle(q, k, v, causal=workload.causal, features=features)[0]
    alone = oracle(q[:1, -1:], k[:1, -1:], v[:1, -1:], causal=workload.causal, features=last_heads(features, 1))[0]
    torch.testing.assert_close(alone, whole[:1, -1:])


LEFT = replace(SQUARE, window_left=40)
BOTH_SIDES = replace(SQUARE, causal=False, window_left=40, window_right=7)


def answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, features: Features) -> torch.Tensor:
    """What the oracle says of tensors in bshd order."""
    views = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return oracle(*views, causal=causal, features=features)[0].to(q.dtype).transpose(1, 2)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_fa3_is_called_in_its_own_layout(as_tuple: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool, **options: Any) -> Any:
        assert all(t.is_contiguous() and t.shape == (2, 96, 2, 32) for t in (q, k, v))
        assert options.keys() <= {"window_size", "softcap"}
        left, right = options.get("window_size", (-1, -1))
        window = (None if left < 0 else left, None if right < 0 else right)
        out = answer(q, k, v, causal, Features(window=window, softcap=options.get("softcap", 0.0)))
        return (out, None) if as_tuple else out

    fake = fake_module(monkeypatch, impls.FA3_MODULE)
    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    fa3 = next(impl for impl in IMPLS if impl.name == "fa3")
    for workload in (SQUARE, LEFT, BOTH_SIDES, replace(SQUARE, softcap=True)):
        assert fa3.unsupported(workload) is None
        close(fa3.prepare(workload, inputs := make_inputs(workload, copies=2, seed=1, device=CPU)), workload, inputs)


def test_a_build_of_fa3_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3 = next(impl for impl in IMPLS if impl.name == "fa3")
    assert fa3.unsupported(SQUARE) == "fa3_fwd_interface is not installed"
    fake_module(monkeypatch, impls.FA3_MODULE)
    halves = replace(SQUARE, dtype="fp16")
    assert [fa3.unsupported(w) for w in (halves, LEFT, replace(SQUARE, softcap=True))] == [None] * 3
    flags = {f"FLASHATTENTION_DISABLE_{part}": True for part in ("FP16", "LOCAL", "SOFTCAP")}
    fake_module(monkeypatch, impls.FA3_CONFIG).CONFIG = {"build_flags": flags}  # type: ignore[attr-defined]
    assert fa3.unsupported(halves) == "this build does not compute in fp16"
    assert fa3.unsupported(replace(SQUARE, softcap=True)) == "this build has no softcap"
    assert fa3.unsupported(LEFT) == "this build has no windows"
    assert fa3.unsupported(replace(LEFT, window_left=95)) is None  # it hides nothing
    assert fa3.unsupported(replace(SQUARE, dtype="fp32")) == "this build does not compute in fp32"
    assert fa3.unsupported(replace(SQUARE, sink=True)) == "FlashAttention-3 has no ALiBi, sinks, bias or mask"


def test_fa2_has_windows_and_alibi_through_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def op(q: Any, k: Any, v: Any, cum_q: Any, cum_k: Any, *more: Any, **options: Any) -> Any:
        assert (cum_q, cum_k, *more) == (None, None, 96, 96, 0.0, causal, False)
        assert all(t.is_contiguous() and t.shape == (2, 96, 2, 32) for t in (q, k, v))
        window = (options.get("window_size_left"), options.get("window_size_right"))
        return answer(q, k, v, causal, Features(window=window, alibi_slopes=options.get("alibi_slopes"))), None

    monkeypatch.setattr(fa2, "flash_op", lambda: op)
    theirs = next(impl for impl in IMPLS if impl.name == "sdpa-flash")
    for workload in (LEFT, BOTH_SIDES, replace(SQUARE, alibi=True), replace(LEFT, alibi=True)):
        assert theirs.unsupported(workload) is None
        causal = workload.causal
        call = theirs.prepare(workload, inputs := make_inputs(workload, copies=2, seed=1, device=CPU))
        close(call, workload, inputs)
    assert theirs.unsupported(SQUARE) is None
    assert theirs.unsupported(replace(LEFT, sink=True)) == fa2.UNSUPPORTED
    assert theirs.unsupported(replace(SQUARE, bias="full")) is not None
    assert theirs.unsupported(replace(LEFT, head_dim_v=16)) == "the op takes one head_dim for q, k and v"
    assert theirs.unsupported(replace(LEFT, head_dim=512, head_dim_v=512)) == "its head_dim ends at 256"
    assert theirs.unsupported(replace(LEFT, dtype="fp32")) == "it computes in bf16 and fp16, not fp32"


def test_torchs_op_takes_these_arguments() -> None:
    workload = replace(LEFT, head_dim=64, head_dim_v=64, alibi=True)
    inputs = make_inputs(workload, copies=1, seed=1, device=CPU)
    groups = {name: tuple(t.to("meta") for t in getattr(inputs, name)) for name in ("q", "k", "v")}
    slopes = inputs.features[0].alibi_slopes
    assert slopes is not None
    features = (replace(inputs.features[0], alibi_slopes=slopes.to("meta")),)
    out = fa2.op_call(workload, replace(inputs, features=features, **groups))(0)
    assert (out.shape, out.device.type) == (inputs.q[0].shape, "meta")


def test_fa4_gets_every_feature_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[float] = []

    def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool, **options: Any) -> Any:
        assert options.keys() <= {"window_size", "score_mod", "learnable_sink"}
        softcap = options.get("score_mod", 0.0)  # the function itself is stood in for by its cap
        window, sinks = options.get("window_size", (None, None)), options.get("learnable_sink")
        return answer(q, k, v, causal, Features(window=window, softcap=softcap, sinks=sinks)), None

    def create_softcap_scoremod(cap: float) -> float:
        caps.append(cap)
        return cap

    fake_module(monkeypatch, "flash_attn")
    fake_module(monkeypatch, fa4.MODULE).flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    utils = fake_module(monkeypatch, f"{fa4.MODULE}.utils")
    utils.create_softcap_scoremod = create_softcap_scoremod  # type: ignore[attr-defined]
    theirs = next(impl for impl in IMPLS if impl.name == "fa4")
    odd = Workload.parse("b1-h4-hk2-sq40-sk77-d32-dv16-fp16")
    capped = replace(SQUARE, softcap=True)
    for workload in (SQUARE, odd, LEFT, BOTH_SIDES, capped, replace(LEFT, sink=True, nheads_k=1)):
        assert theirs.unsupported(workload) is None
        call = theirs.prepare(workload, inputs := make_inputs(workload, copies=2, seed=1, device=CPU))
        close(call, workload, inputs)
    assert caps == [SOFTCAP]
    assert theirs.unsupported(replace(SQUARE, alibi=True)) is None
    assert theirs.unsupported(replace(SQUARE, causal=False, mask="keys")) is None
    own = "with a function for a mask it has no causal mask and no window of its own"
    assert theirs.unsupported(replace(SQUARE, mask="keys")) == own
    one = "of softcap, ALiBi, a bias and a mask, one at a time is written in the CuTe DSL here"
    assert theirs.unsupported(replace(SQUARE, softcap=True, alibi=True)) == one
    assert theirs.unsupported(replace(SQUARE, head_dim=36)) == "its head_dim is a multiple of 8"
    assert theirs.unsupported(replace(SQUARE, head_dim=512)) == "its head_dim ends at 256"


def test_standard_attention_says_when_its_scores_are_too_large() -> None:
    standard = next(impl for impl in IMPLS if impl.name == "standard")
    fits = Workload(batch=1, nheads=32, seqlen_q=16384, head_dim=64)
    assert impls.standard_bytes(fits) == 2 * 32 * 16384**2 * 2
    assert standard.unsupported(fits) is None
    assert standard.unsupported(fits.with_shape(batch=4)) == (
        "its scores and probabilities take 128 GiB, the limit is 64 GiB"
    )
