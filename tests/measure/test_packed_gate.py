"""The gate of kernels of packed sequences and the times on each profile, with emulated kernels on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import UnsupportedError
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.bench import Bench
from flashgen.measure.data_kinds import hard_kind
from flashgen.measure.directions import direction_of
from flashgen.measure.inputs import rotation_copies
from flashgen.measure.mixed_case import steps_of
from flashgen.measure.odd_shapes import check_odd
from flashgen.measure.packed_inputs import PackedForm, make_packed_inputs
from flashgen.measure.protocol import EvaluateJob, RaceJob, RaceResult
from flashgen.measure.service import Judge
from flashgen.measure.verify import Errors
from tests.fakes.decode import EmulatedStep
from tests.fakes.packed import EmulatedPack, EmulatedPages

RAGGED = Workload.parse("b4-h4-hk2-tq160-s79-d16-causal-varlen")
KEYS = (
    "b4-h4-hk2-tq160-s79-d16-causal-varlen-ramp",
    "fp16-b3-h2-tq50-tk90-sq30-sk60-d16-dv32-varlen-wl20-wr3-sink-tail",
    "bwd-b4-h4-hk2-tq80-s40-d16-causal-varlen-mixed",
    "bwd-fp32-b3-h2-tq50-tk90-sq30-sk60-d16-varlen-softcap-alibi-same",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_kernel_is_judged_by_the_rows_of_each_sequence(key: str) -> None:
    w = Workload.parse(key)
    case = direction_of(w).problem(w, 2, 5, torch.device("cpu"), "randn")
    verdict = case.run(EmulatedPack(causal=w.causal), 1)
    assert isinstance(verdict, Errors), verdict
    if not w.causal:
        assert isinstance(case.run(EmulatedPack(causal=w.causal, extra=1)), Failure), "a key of a neighbour"


@pytest.mark.parametrize(
    "key", ["fwd-bf16-d16-varlen-causal-sink", "fwd-fp16-d16-varlen-window-alibi", "bwd-bf16-d16-varlen-window"]
)
def test_odd_packs_have_poison_in_rows_that_do_not_count(key: str) -> None:
    spec = Specialization.parse(key)
    problems = direction_of(spec).odd_problems(spec, torch.device("cpu"))
    kernel = EmulatedPack(causal=spec.causal)
    assert check_odd(kernel, problems, 1) is None
    for wrong, why in ((replace(kernel, extra=1), "is off by"), (replace(kernel, writes_unused=False), "unwritten")):
        found = check_odd(wrong, problems)
        assert found is not None
        assert "at queries (" in found.reason
        assert why in found.reason


PAGED = (
    "fp16-b4-h4-hk2-tq40-tk160-sq19-sk79-d16-causal-varlen-page16-ramp",
    "fp16-b4-h4-hk2-tq40-tk160-sq19-sk79-d16-dv32-varlen-wl20-page5-sink-tail",
)


@pytest.mark.parametrize("key", PAGED)
def test_keys_in_pages_are_found_by_a_table(key: str) -> None:
    w = Workload.parse(key)
    case = direction_of(w).problem(w, 3, 5, torch.device("cpu"), "randn")
    kernel = EmulatedPages(causal=w.causal)
    verdict = case.run(kernel, 1)
    assert isinstance(verdict, Errors), verdict
    for wrong in (replace(kernel, behind=1), replace(kernel, shift=1)):
        assert isinstance(case.run(wrong), Failure)
    if w.window_left is not None:
        assert isinstance(case.run(replace(kernel, clears=False)), Failure), "poison before the window"


@pytest.mark.parametrize("page", [1, 16, 64])
def test_odd_packs_over_pages_have_poison_in_all_that_nobody_sees(page: int) -> None:
    spec = Specialization.parse(f"fwd-fp16-d16-varlen-window-page{page}")
    problems = direction_of(spec).odd_problems(spec, torch.device("cpu"))
    kernel = EmulatedPages(causal=spec.causal)
    assert check_odd(kernel, problems, 1) is None
    for wrong in (replace(kernel, behind=1), replace(kernel, clears=False), replace(kernel, writes_unused=False)):
        found = check_odd(wrong, problems)
        assert found is not None
        assert "at queries (" in found.reason


def test_the_pages_of_all_copies_are_scattered_in_one_pool_with_stale_entries() -> None:
    w = Workload.parse(PAGED[1])
    inputs = direction_of(w).problem(w, 3, 5, torch.device("cpu"), "randn").inputs  # type: ignore[attr-defined]
    tables = [features.block_table for features in inputs.features]
    assert all(pool is inputs.k[0] for pool in inputs.k)
    lengths, queries = w.each_length, w.each_seqlen_q
    needed = [[*range(max(n - m - 20, 0) // 5, -(-n // 5))] if m else [] for n, m in zip(lengths, queries, strict=True)]
    taken = [int(table[b, entry]) for table in tables for b, entries in enumerate(needed) for entry in entries]
    assert len(set(taken)) == len(taken) == len(inputs.k[0]) - 3, "no page is in two places, and three in none"
    assert taken != sorted(taken)
    rest = torch.ones_like(tables[0], dtype=torch.bool)
    for b, entries in enumerate(needed):
        rest[b, entries] = False
    assert set(tables[0][rest].tolist()) == {-1, 2**31 - 1, 0}
    assert not {0, len(inputs.k[0]) - 1} & set(taken), "where stale entries lead"
    spare = torch.tensor([page not in taken for page in range(len(inputs.k[0]))])
    assert torch.isnan(inputs.k[0][spare]).all()
    assert inputs.k[0].stride(0) == 5 * inputs.k[0].stride(2)
    assert inputs.nbytes < 3 * sum(one.numel() * one.element_size() for one in (inputs.k[0], inputs.v[0]))


def test_a_rotation_has_more_pages_than_the_l2_cache_holds() -> None:
    paged, plain = (Workload.parse(f"b8-h32-hk8-tq8192-s4096-d128-causal-varlen{page}") for page in ("-page16", ""))
    l2_bytes = 50 * 2**20
    assert rotation_copies(paged, l2_bytes) * paged.cache_bytes >= 2 * l2_bytes
    assert rotation_copies(plain, l2_bytes) < rotation_copies(paged, l2_bytes)


def test_rows_of_no_sequence_are_nan() -> None:
    form = PackedForm(queries=(3, 0, 5), keys=(3, 0, 5), used_q=(2, 0, 5), spare=4)
    inputs = make_packed_inputs(Workload.parse("b3-h2-tq8-s9-d16-varlen-wl7"), form, copies=2, seed=1, device="cpu")
    unused = [2, 8, 9, 10, 11]
    assert torch.isnan(inputs.q[1]).all(-1).all(1)[0].nonzero().flatten().tolist() == unused
    assert torch.isnan(inputs.v[0]).all(-1).all(1)[0].nonzero().flatten().tolist() == unused[1:]
    features = inputs.features[0]
    assert features.cu_seqlens_q is not None
    assert (features.cu_seqlens_q.tolist(), features.max_seqlens, features.window) == ([0, 3, 3, 8], (9, 9), (7, None))


@dataclass
class Toolchain:
    """A kernel takes `ms` for the longest sequence's rows."""

    def factory(self, spec: Specialization, config: Config) -> Any:
        emulated = EmulatedPack(causal=spec.causal, extra=int(bool(config.get("wrong", False))))

        def factory(*given: Any) -> Any:
            launch = emulated(*given)

            def run(*arguments: Any) -> Any:
                ends = arguments[-1].cu_seqlens_q
                Stopwatch.total_ms += int(config["ms"]) * int(ends.diff().max())
                return launch(*arguments)

            return run

        return factory

    def is_deterministic(self, config: Config) -> bool:
        return True

    def exact_sibling(self, spec: Specialization, config: Config) -> Config:
        return config

    def most_keys(self, config: Config) -> int | None:
        return None

    def default(self, workload: Workload) -> Config:
        raise UnsupportedError("nothing serves this")


class Stopwatch:
    total_ms = 0.0

    @classmethod
    def spend(cls, ms: int) -> None:
        cls.total_ms += ms

    def elapsed_ms(self, warm: Any, measured: Any) -> float:
        warm()
        Stopwatch.total_ms = 0.0
        measured()
        return Stopwatch.total_ms

    def capture(self, calls: object) -> object:
        raise AssertionError("these calls are too slow for a graph")

    def sm_clock_mhz(self) -> float | None:
        return None


def config(**knobs: int | bool) -> Config:
    return Config.of("portable_forward", knobs)


def test_a_candidate_is_timed_on_every_profile_of_lengths() -> None:
    assert hard_kind(RAGGED) is None
    device = replace(find_device("h200"), l2_bytes=10)
    bench = Bench(device, torch.device("cpu"), Toolchain(), Stopwatch(), 1e9)  # type: ignore[arg-type]
    bench._odd[RAGGED.specialization] = ()  # which have a test of their own
    judge = Judge(bench, Stopwatch(), lambda stage, subject: None)  # type: ignore[arg-type]
    found = judge.evaluate(EvaluateJob(workload=RAGGED, config=config(ms=1), window_s=0.001))
    assert isinstance(found, Measurement), found
    assert (found.median_ms, found.profile_ms) == (40, {"ramp": 70, "tail": 79, "close": 48})
    raced = judge.race(
        RaceJob(workload=RAGGED, configs=(config(ms=1), config(ms=2)), rounds=2, window_s=0.001, hard=True)
    )
    assert [each.profile_ms["tail"] for each in raced.outcomes if isinstance(each, Measurement)] == [79, 158]
    assert RaceJob(workload=RAGGED, configs=(config(ms=1),), hard=True).windows == 4


MIXED = Workload.parse("fp16-b8-h4-hk2-tq46-sq30-tk300-sk79-d16-causal-varlen-page16-mixed")


@dataclass
class BothToolchain(Toolchain):
    """A forward config takes `ms` for each row of its sequences, and a decode kernel one for each of its steps."""

    extra: int = 0

    def factory(self, spec: Specialization, config: Config) -> Any:
        if spec.direction == "decode":
            return EmulatedStep(extra=self.extra, launched=lambda tensors: Stopwatch.spend(len(tensors.lens)))
        emulated = EmulatedPages(causal=spec.causal)

        def factory(*given: Any) -> Any:
            launch = emulated(*given)

            def run(*arguments: Any) -> Any:
                Stopwatch.spend(int(config["ms"]) * int(arguments[-1].cu_seqlens_q.diff().sum()))
                return launch(*arguments)

            return run

        return factory

    def default(self, workload: Workload) -> Config:
        return config(ms=1)


@pytest.mark.parametrize("extra", [0, -1])
def test_a_mixed_batch_is_timed_in_two_launches_beside_the_one(extra: int) -> None:
    steps = steps_of(MIXED)
    assert steps is not None
    assert (steps.batch, steps.seqlen_q, steps.each_length) == (6, 1, (79,) * 6)
    assert MIXED.each_seqlen_q == (*(1,) * 6, 20, 20)
    device = replace(find_device("h200"), l2_bytes=10)
    bench = Bench(device, torch.device("cpu"), BothToolchain(extra), Stopwatch(), 1e9)  # type: ignore[arg-type]
    bench._odd[MIXED.specialization] = ()
    judge = Judge(bench, Stopwatch(), lambda stage, subject: None)  # type: ignore[arg-type]
    job = RaceJob(workload=MIXED, configs=(config(ms=3), config(ms=2)), rounds=1, window_s=0.001, baselines=True)
    raced = judge.race(job)
    assert isinstance(raced, RaceResult)
    found = {one.impl: one.median_ms for one in raced.baselines}
    assert found == ({"split": 3 * 40 + 6} if extra == 0 else {}), "what computes something else is not timed"
    times = [(one.median_ms, one.reference_ms) for one in raced.outcomes if isinstance(one, Measurement)]
    assert times == [(3 * 46, 46), (2 * 46, 46)], "the default config is the reference"
    alone = judge.race(replace(job, baselines=False))
    assert isinstance(alone, RaceResult)
    assert not alone.baselines


@pytest.mark.parametrize("change", [{"lengths": "ramp"}, {"page_size": None}, {"total_q": 100, "seqlen_q": 15}])
def test_no_other_batch_is_split(change: dict[str, Any]) -> None:
    assert steps_of(replace(MIXED, **change)) is None
