"""The gate of decode kernels and the order of work on them, with emulated kernels on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import UnsupportedError
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.decode_plan import POINTERS
from flashgen.measure.bench import Bench
from flashgen.measure.data_kinds import hard_kind
from flashgen.measure.decode_case import decode_problem
from flashgen.measure.decode_inputs import STALE, DecodeTensors, make_decode_inputs
from flashgen.measure.decode_launch import pointers_of
from flashgen.measure.decode_odd import odd_decode_problems
from flashgen.measure.odd_shapes import check_odd
from flashgen.measure.protocol import EvaluateJob, RaceJob
from flashgen.measure.service import Judge
from flashgen.measure.verify import Errors
from tests.fakes.decode import EmulatedStep

RAGGED = Workload.parse("dec-b4-h4-hk2-sk70-d16-page16")
KEYS = (
    "dec-b3-h4-hk2-sk70-d16-ramp",
    "dec-b3-h4-hk2-sk70-d16-page16-sink-tail",
    "dec-fp16-b2-h6-hk2-sq3-sk40-d16-dv32-causal-wl9-softcap",
    "dec-b2-h4-hk4-sq2-sk40-d16-alibi-same",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_kernel_is_judged_by_the_keys_of_each_sequence(key: str) -> None:
    case = decode_problem(Workload.parse(key), 1, 5, "cpu")
    assert isinstance(case.run(EmulatedStep(), 1), Errors)
    assert isinstance(case.run(EmulatedStep(extra=-1)), Failure), "a key that is left out"


@pytest.mark.parametrize("key", KEYS)
def test_odd_steps_have_poison_behind_every_length(key: str) -> None:
    problems = odd_decode_problems(Workload.parse(key).specialization, "cpu")
    assert check_odd(EmulatedStep(), problems, 1) is None
    wrong = check_odd(EmulatedStep(extra=1), problems)
    assert wrong is not None
    assert "lengths (0, 1," in wrong.reason
    assert "NaN" in wrong.reason


def test_kernels_get_the_address_of_every_tensor_there_is() -> None:
    (one,) = make_decode_inputs(replace(RAGGED, sink=True), copies=1, seed=1, device="cpu")
    assert one.table is not None
    assert one.features.sinks is not None
    given = dict(zip(POINTERS, pointers_of(one), strict=True))
    assert (given["Table"], given["Sinks"]) == (one.table.data_ptr(), one.features.sinks.data_ptr())
    assert {name for name, address in given.items() if not address} == {
        "Leftpad",
        "BatchIdx",
        "OwnLens",
        "AlibiSlopes",
    }


def test_what_no_query_sees_is_nan_and_stale() -> None:
    w = replace(RAGGED, lengths="tail", window_left=20)
    (one,) = make_decode_inputs(w, copies=1, seed=1, device="cpu")
    assert one.table is not None
    used = [*one.table[0].tolist(), *one.table[1:, 0].tolist()]
    assert len(set(used)) == 8, "five pages of 70 keys, and three of one"
    assert set(one.table[1:, 1:].flatten().tolist()) == set(STALE)
    read = ~torch.isnan(one.k).all(-1).all(-1)
    assert int(read.sum()) == 21 + 3, "a window of 20 keys and the own one, and three sequences of one key"


@dataclass
class Toolchain:
    """A kernel takes `ms` for each million keys of its sequences."""

    seen: list[int] = field(default_factory=list)

    def factory(self, spec: Specialization, config: Config) -> EmulatedStep:
        def note(tensors: DecodeTensors) -> None:
            Stopwatch.total_ms += int(config["ms"]) * int(tensors.lens.sum())

        return EmulatedStep(extra=-1 if config.get("wrong", False) else 0, launched=note)

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

    def elapsed_ms(self, warm: object, measured: object) -> float:
        warm()  # type: ignore[operator]
        Stopwatch.total_ms = 0.0
        measured()  # type: ignore[operator]
        return Stopwatch.total_ms

    def capture(self, calls: object) -> object:
        raise AssertionError("these calls are too slow for a graph")

    def sm_clock_mhz(self) -> float | None:
        return None


def config(**knobs: int | bool) -> Config:
    return Config.of("portable_decode", knobs)


def test_a_candidate_is_timed_on_every_profile_of_lengths() -> None:
    assert hard_kind(RAGGED) is None
    device = replace(find_device("h200"), l2_bytes=10)
    bench = Bench(device, torch.device("cpu"), Toolchain(), Stopwatch(), 1e9)  # type: ignore[arg-type]
    judge = Judge(bench, Stopwatch(), lambda stage, subject: None)  # type: ignore[arg-type]
    keys = {"same": 280, "ramp": 1 + 24 + 47 + 70, "tail": 73}
    found = judge.evaluate(EvaluateJob(workload=RAGGED, config=config(ms=1), window_s=0.001))
    assert isinstance(found, Measurement)
    assert found.median_ms == keys["same"]
    assert found.profile_ms == {"ramp": keys["ramp"], "tail": keys["tail"]}
    raced = judge.race(
        RaceJob(workload=RAGGED, configs=(config(ms=1), config(ms=2)), rounds=2, window_s=0.001, hard=True)
    )
    assert not isinstance(raced, Failure)
    assert [each.profile_ms["tail"] for each in raced.outcomes if isinstance(each, Measurement)] == [73, 146]
    assert isinstance(judge.evaluate(EvaluateJob(workload=RAGGED, config=config(ms=1, wrong=True))), Failure)
    dropped = judge.evaluate(EvaluateJob(workload=RAGGED, config=config(ms=9), drop_above_ms=300.0))
    assert isinstance(dropped, Measurement)
    assert dropped.profile_times_ms == ()
