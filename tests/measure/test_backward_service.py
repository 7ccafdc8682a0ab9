"""Backward candidates go the same way as forward ones: with emulated kernels on the CPU and a stopwatch that counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from flashgen.codegen.families import FAMILIES, most_keys
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.values import Features
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.plan import BackwardLaunch
from flashgen.measure import odd_shapes
from flashgen.measure.backward_inputs import make_backward_inputs
from flashgen.measure.backward_verification_case import BackwardFactory, backward_problem
from flashgen.measure.bench import Bench
from flashgen.measure.protocol import EvaluateJob, RaceJob, RaceResult, specialization
from flashgen.measure.reference import oracle
from flashgen.measure.service import Judge
from flashgen.measure.toolchain import GpuToolchain
from tests.fakes.attention import Emulated
from tests.fakes.attention_backward import EmulatedBackward
from tests.measure.clocks import Clocked, CountingStopwatch

SMALL = Workload.parse("bwd-bf16-b1-h2-hk1-s40-d16-causal-keybias-sink")


def config(**knobs: int | str | bool) -> Config:
    return Config.of("emulated", knobs)


@dataclass
class ClockedBackward:
    """An emulated backward pass that takes `ms`."""

    inner: EmulatedBackward
    ms: float

    def factory(self, *_: BackwardTensors | Features) -> BackwardLaunch:
        return self

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> torch.Tensor:
        Clocked.total_ms += self.ms
        return self.inner(tensors, softmax_scale, q_offset, features)


@dataclass
class EmulatedToolchain:
    """Reads the behaviour of a backward pass from its knobs."""

    specs: set[Specialization] = field(default_factory=set)
    made: dict[Config, ClockedBackward] = field(default_factory=dict)

    def factory(self, spec: Specialization, config: Config) -> BackwardFactory:
        self.specs.add(spec)
        knobs = dict(config.knobs)
        ms = float(knobs.pop("ms", 1))
        knobs.pop("atomic", None)
        jitter = int(knobs.pop("jitter_permille", 0)) / 1000
        inner = EmulatedBackward(scores=Emulated(causal=spec.causal), jitter=jitter, **knobs)  # type: ignore[arg-type]
        return self.made.setdefault(config, ClockedBackward(inner=inner, ms=ms)).factory

    def is_deterministic(self, config: Config) -> bool:
        return "atomic" not in dict(config.knobs)

    def exact_sibling(self, spec: Specialization, config: Config) -> Config:
        return config

    def most_keys(self, config: Config) -> int | None:
        return None

    def default(self, workload: Workload) -> Config:
        raise UnsupportedError("nothing serves this")


@dataclass
class Table:
    toolchain: EmulatedToolchain = field(default_factory=EmulatedToolchain)

    def __post_init__(self) -> None:
        device = replace(find_device("h200"), l2_bytes=20_000)
        self.bench = Bench(device, torch.device("cpu"), self.toolchain, CountingStopwatch(), 1e9)
        self.judge = Judge(self.bench, CountingStopwatch(), lambda stage, subject: None)

    def evaluate(self, config: Config, workload: Workload = SMALL) -> Measurement | Failure:
        return self.judge.evaluate(EvaluateJob(workload=workload, config=config, window_s=0.012))


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """One for all tests, with the smaller ones of the odd shapes: they are made once."""
    with pytest.MonkeyPatch.context() as patch:
        small = tuple(shape for shape in odd_shapes.ODD_SHAPES if shape.seqlen_q * shape.seqlen_k < 50_000)
        patch.setattr(odd_shapes, "ODD_SHAPES", small)
        yield Table()


def test_a_good_candidate_gets_times_and_errors_and_a_wrong_one_a_reason(table: Table) -> None:
    found = table.evaluate(config(ms=2))
    assert isinstance(found, Measurement), found
    assert found.times_ms == (2.0, 2.0, 2.0)
    assert 0 < found.mean_error < found.max_error < 0.05
    wrong = table.evaluate(config(forget_delta=True))
    assert isinstance(wrong, Failure)
    assert wrong.stage == "verify"
    assert wrong.reason.startswith("at 1x1")
    (spec,) = table.toolchain.specs
    assert spec == specialization(SMALL)
    assert spec.bias_grad
    assert not spec.sink


def test_a_race_measures_backward_passes_and_asks_them_again(table: Table) -> None:
    job = RaceJob(workload=SMALL, configs=(config(ms=3), config(ms=1)), rounds=2, warm_s=0.002, window_s=0.004)
    result = table.judge.race(job)
    assert isinstance(result, RaceResult), result
    assert [outcome.median_ms for outcome in result.outcomes if isinstance(outcome, Measurement)] == [3.0, 1.0]


def test_only_families_that_promise_the_same_bits_are_asked_for_them(table: Table) -> None:
    promised = table.evaluate(config(jitter_permille=1))
    assert isinstance(promised, Failure)
    assert "other bits of dq" in promised.reason
    assert isinstance(table.evaluate(config(jitter_permille=1, atomic=True)), Measurement)
    toolchain = GpuToolchain(find_device("h200"), 0)
    for row in FAMILIES:
        assert toolchain.is_deterministic(Config.of(row.id, {})) == row.is_deterministic
    assert not toolchain.is_deterministic(Config.of("emulated", {}))


def test_what_has_few_keys_alone_is_judged_on_shapes_that_have_no_more() -> None:
    @dataclass
    class Counting(EmulatedToolchain):
        keys: list[int] = field(default_factory=list)

        def factory(self, spec: Specialization, config: Config) -> BackwardFactory:
            made = super().factory(spec, Config.of(config.family, {}))

            def counted(tensors: BackwardTensors, features: Features) -> BackwardLaunch:
                self.keys.append(tensors.k.shape[2])
                return made(tensors, features)

            return counted

        def most_keys(self, config: Config) -> int | None:
            return most_keys(config)

    workload = Workload.parse("bwd-bf16-b1-h2-hk1-s40-d16-causal")
    counting = Counting()
    few = Config.of("hopper_backward_fused", {"dq_conversion": "none"})
    assert isinstance(Table(toolchain=counting).evaluate(few, workload), Measurement)
    assert len(counting.keys) > 10
    assert max(counting.keys) == most_keys(few) == 128


def test_every_copy_has_the_output_and_lse_of_its_own_inputs() -> None:
    made = backward_problem(SMALL, 3, 5, torch.device("cpu"))
    assert made.copies == 3
    assert len({t.dout.data_ptr() for t in made.inputs.tensors}) == 3
    for t, features in zip(made.inputs.tensors, made.inputs.features, strict=True):
        out, lse = oracle(t.q, t.k, t.v, causal=True, features=features)
        torch.testing.assert_close(t.out.double(), out, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(t.lse.double(), lse, rtol=1e-5, atol=1e-5)
    sizes = [each.numel() * each.element_size() for t in made.inputs.tensors for each in (t.q, t.dout, t.dk, t.dv)]
    assert sum(sizes) < made.inputs.nbytes < made.nbytes


def test_a_backward_workload_has_the_inputs_of_its_forward_pass() -> None:
    forward = make_backward_inputs(replace(SMALL, direction="forward"), copies=1, seed=1, device="cpu")
    backward = make_backward_inputs(SMALL, copies=1, seed=1, device="cpu", padding=16, layout="bshd", with_dlse=True)
    first, second = forward.tensors[0], backward.tensors[0]
    assert first.dlse is None
    assert second.dlse is not None
    assert second.dlse.is_contiguous()
    assert second.dbias is not None
    assert second.dbias.shape == (1, 2, 40)
    assert second.dbias.dtype == torch.float32
    assert second.q.stride() != second.dout.stride()
    assert second.dq.stride() == second.q.stride() != second.dk.stride()
    assert torch.isnan(second.dq).all()
    assert len(backward.guards) == 4
    full = make_backward_inputs(replace(SMALL, bias="full"), copies=2, seed=1, device="cpu").tensors[1].dbias
    assert full is not None
    assert full.shape == (1, 2, 40, 40)
    assert full.dtype == torch.bfloat16
    assert full.is_contiguous()
