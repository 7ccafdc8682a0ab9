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
from flashgen.measure.odd_shapes import check_odd
from flashgen.measure.packed_inputs import PackedForm, make_packed_inputs
from flashgen.measure.protocol import EvaluateJob, RaceJob
from flashgen.measure.service import Judge
from flashgen.measure.verify import Errors
from tests.fakes.packed import EmulatedPack

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

    def default(self, workload: Workload) -> Config:
        raise UnsupportedError("nothing serves this")


class Stopwatch:
    total_ms = 0.0

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
    assert (found.median_ms, found.profile_ms) == (40, {"ramp": 70, "tail": 79})
    raced = judge.race(
        RaceJob(workload=RAGGED, configs=(config(ms=1), config(ms=2)), rounds=2, window_s=0.001, hard=True)
    )
    assert [each.profile_ms["tail"] for each in raced.outcomes if isinstance(each, Measurement)] == [79, 158]
    assert RaceJob(workload=RAGGED, configs=(config(ms=1),), hard=True).windows == 3
