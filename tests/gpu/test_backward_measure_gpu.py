"""Backward passes on a real GPU: the oracle is the same on both sides, torch's kernels pass the gate and are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from flashgen.codegen.families import applicable, default_config
from flashgen.core.features.values import Features
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import BackwardLaunch
from flashgen.launch.sdpa import BACKENDS
from flashgen.measure import gpu
from flashgen.measure.backward_baselines import prepared
from flashgen.measure.backward_inputs import make_backward_inputs, written
from flashgen.measure.backward_reference import exact_gradients, rounded_gradients
from flashgen.measure.backward_verification_case import BackwardVerificationCase, backward_problem
from flashgen.measure.bench import Bench, Candidate
from flashgen.measure.executor import LocalExecutor
from flashgen.measure.protocol import EvaluateJob, RaceJob, specialization
from flashgen.measure.score_rule import ScoreRule
from flashgen.measure.timing import CudaStopwatch, make_unit, measure
from flashgen.measure.toolchain import GpuToolchain
from flashgen.measure.verify import Errors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    with LocalExecutor() as made:
        yield made


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = current_device()
    return Bench(device, torch.device("cuda", 0), GpuToolchain(device, 0), CudaStopwatch(gpu.sm_clock_mhz), 8e9)


def problem(key: str, copies: int = 1) -> tuple[Workload, BackwardVerificationCase]:
    workload = Workload.parse(f"bwd-{key}")
    return workload, backward_problem(workload, copies, 5, torch.device("cuda"))


class TorchBackward:
    """One of torch's backends in the place of a generated kernel."""

    def __init__(self, impl: str, workload: Workload, made: BackwardVerificationCase) -> None:
        found = prepared(impl, workload, made)
        assert not isinstance(found, str), found
        self._call = found

    def factory(self, *_: BackwardTensors | Features) -> BackwardLaunch:
        return self

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> torch.Tensor:
        with self._call.context():
            gradients = self._call.run(0)
        assert isinstance(gradients, tuple)
        for target, gradient in zip(written(tensors).values(), gradients, strict=False):
            target.copy_(gradient)
        return -(tensors.dout.float() * tensors.out.float()).sum(-1)


@pytest.mark.parametrize(
    "key",
    ["b2-h6-hk2-sq113-sk203-d64-causal", "b2-h4-hk2-sq200-sk300-d64-wl90-wr20-softcap-alibi-sink-bias-mask"],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_oracle_and_eager_agree_with_the_cpu(key: str, dtype: str) -> None:
    workload = Workload.parse(f"bwd-{dtype}-{key}")
    inputs = make_backward_inputs(workload, copies=1, seed=5, device="cuda", with_dlse=True)
    tensors, features = inputs.tensors[0], inputs.features[0]
    moved = {name: getattr(features, name) for name in ("alibi_slopes", "sinks", "bias", "mask")}
    features_on_cpu = replace(features, **{name: given.cpu() for name, given in moved.items() if given is not None})
    shape = None if features.bias is None else tuple(features.bias.shape)
    found = []
    for place, given in (("cuda", features), ("cpu", features_on_cpu)):
        q, k, v, dout, dlse = (getattr(tensors, name).to(place) for name in ("q", "k", "v", "dout", "dlse"))
        rule = ScoreRule.of(q, k, causal=workload.causal, q_offset=None, softmax_scale=None, features=given)
        exact = exact_gradients(q, k, v, dout, rule, dlse=dlse, bias_shape=shape)  # type: ignore[arg-type]
        eager = rounded_gradients(q, k, v, dout, rule, dlse=dlse, bias_shape=shape)  # type: ignore[arg-type]
        found.append((exact, eager))
    (there, eager_there), (here, eager_here) = found
    for name, right in here.gradients.items():
        torch.testing.assert_close(there.gradients[name].cpu(), right, rtol=1e-10, atol=1e-11, msg=name)
        torch.testing.assert_close(there.noise[name].cpu(), here.noise[name], rtol=1e-9, atol=1e-12, msg=name)
        errors = [float((eager[name].cpu().double() - right).abs().mean()) for eager in (eager_there, eager_here)]
        assert errors[0] == pytest.approx(errors[1], rel=0.3), name


@pytest.mark.parametrize(
    ("key", "able"),
    [
        ("bf16-b1-h8-s1024-d64", {"sdpa-flash", "sdpa-cudnn", "sdpa-efficient"}),
        ("bf16-b2-h8-hk2-s1024-d128-causal", {"sdpa-flash", "sdpa-cudnn"}),
        ("fp16-b1-h4-sq200-sk777-d64-causal", {"sdpa-flash"}),
        ("bf16-b2-h4-s500-d64-bias", {"sdpa-efficient"}),
        ("bf16-b2-h4-s512-d64-mask", {"sdpa-efficient"}),
        ("bf16-b2-h4-s512-d64-keybias", {"sdpa-efficient"}),
    ],
)
def test_torchs_backends_compute_the_same_gradients_and_pass_the_gate(key: str, able: set[str]) -> None:
    """The gate is fair to the best kernels that there are; a bias of torch's has no gradient for each head."""
    workload, made = problem(key)
    reasons = {impl: found for impl in BACKENDS if isinstance(found := prepared(impl, workload, made), str)}
    assert able <= set(BACKENDS) - reasons.keys(), reasons
    if workload.bias != "keys":
        for impl in sorted(able):
            verdict = made.run(TorchBackward(impl, workload, made).factory)
            assert isinstance(verdict, Errors), (impl, verdict)
            assert 0 < verdict.mean_error < verdict.max_error < 0.1


@pytest.mark.alone
@pytest.mark.parametrize("impl", ["sdpa-flash", "sdpa-cudnn"])
@pytest.mark.parametrize("key", ["bf16-b1-h4-s256-d64", "bf16-b1-h16-s4096-d128-causal"])
def test_torchs_backends_are_timed_without_the_host(impl: str, key: str) -> None:
    """The short one is recorded into a graph; the long one takes as long as through autograd, or somewhat less."""
    workload, made = problem(key, copies=2)
    found = prepared(impl, workload, made)
    assert not isinstance(found, str), found
    stopwatch = CudaStopwatch()
    unit = make_unit(found.run, 2, stopwatch, found.context)
    window = measure(unit, stopwatch, warm_ms=20.0, window_ms=60.0)
    leaves = [getattr(made.inputs.tensors[0], name).detach().requires_grad_() for name in ("q", "k", "v")]
    with torch.nn.attention.sdpa_kernel(BACKENDS[impl]):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=workload.causal)
        dout = made.inputs.tensors[0].dout

        def autograd() -> None:
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

        autograd()
        through_autograd = stopwatch.elapsed_ms(autograd, lambda: [autograd() for _ in range(20)]) / 20
    assert window.ms < 1.1 * through_autograd
    assert window.ms > 0.5 * through_autograd or unit.calls > 1


def test_a_disturbed_gradient_is_rejected() -> None:
    workload, made = problem("bf16-b1-h8-s1024-d64-causal")
    kernel = TorchBackward("sdpa-flash", workload, made)
    assert isinstance(made.run(kernel.factory), Errors)

    def disturbed(*_: BackwardTensors | Features) -> BackwardLaunch:
        def launch(
            tensors: BackwardTensors,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
            features: Features | None = None,
        ) -> torch.Tensor:
            delta = kernel(tensors, softmax_scale, q_offset, features)
            tensors.dk[0, 3, 1000] *= 1.3
            return delta

        return launch

    verdict = made.run(disturbed)
    assert isinstance(verdict, Failure)
    assert "dk of batch 0, head 3, key 1000" in verdict.reason


@pytest.mark.parametrize(
    "key",
    [
        "bf16-b1-h16-s1024-d64",
        "bf16-b1-h16-s1024-d64-causal",
        "fp16-b2-h8-hk2-s2048-d128-causal",
        "bf16-b1-h8-hk2-s1024-d64-causal-deterministic",
        "bf16-b1-h8-sq300-sk1000-d64-causal",
        "bf16-b1-h8-s512-d256",
        "bf16-b2-h4-s512-d64-softcap-alibi-sink-wl200-causal",
        "bf16-b2-h4-s512-d64-bias",
        "bf16-b2-h4-s512-d64-keybias-keymask",
        "fp32-b1-h4-s512-d64",
        "tf32-b1-h4-s512-d64-causal",
    ],
)
def test_every_family_that_applies_is_measured(executor: LocalExecutor, key: str) -> None:
    workload, device = Workload.parse(f"bwd-{key}"), executor.describe().device
    spec = specialization(workload)
    for row in applicable(spec, device):
        found = executor.evaluate(EvaluateJob(workload=workload, config=row.default(spec, device)))
        assert isinstance(found, Measurement), (row.id, found)
        assert len(found.times_ms) == 3
        assert 0 < found.mean_error < found.max_error < 0.2
        assert found.reference_ms is not None


@pytest.mark.alone
def test_a_race_with_baselines(executor: LocalExecutor) -> None:
    workload = Workload.parse("bwd-bf16-b1-h16-s4096-d128-causal")
    config = default_config(specialization(workload), executor.describe().device)
    job = RaceJob(workload=workload, configs=(config, config), rounds=3, warm_s=0.1, window_s=0.2, baselines=True)
    result = executor.race(job)
    first, second = result.outcomes
    assert isinstance(first, Measurement), first
    assert isinstance(second, Measurement), second
    assert first.median_ms == pytest.approx(second.median_ms, rel=0.05)
    times = {baseline.impl: baseline.median_ms for baseline in result.baselines}
    assert {"sdpa-flash", "sdpa-cudnn"} <= times.keys()
    assert first.reference_ms == times["sdpa-flash"]


@pytest.mark.alone
def test_verifying_another_candidate_is_cheap(bench: Bench) -> None:
    workload = Workload.parse("bwd-bf16-b2-h16-hk4-s4096-d128-causal")
    started = time.perf_counter()
    state = bench.state(workload)
    torch.cuda.synchronize()
    making = time.perf_counter() - started
    config = default_config(specialization(workload), current_device())
    assert isinstance(bench.candidate(state, config, lambda stage: None), Candidate)
    on_workload, everything = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        bench.candidate(state, config, lambda stage: None)
        on_workload.append(time.perf_counter() - started)
        bench._odd_verdicts.clear()
        started = time.perf_counter()
        bench.candidate(state, config, lambda stage: None)
        everything.append(time.perf_counter() - started)
    assert making < 30
    assert statistics.median(on_workload) < 0.2
    assert statistics.median(everything) < 0.5


def test_copies_defeat_the_cache_and_belong_together(bench: Bench) -> None:
    state = bench.state(Workload.parse("bwd-bf16-b1-h8-s1024-d64"))
    assert isinstance(state.problem, BackwardVerificationCase)
    assert state.problem.copies * state.workload.bytes >= 2 * current_device().l2_bytes
    pointers = {tensors.dout.data_ptr() for tensors in state.problem.inputs.tensors}
    assert len(pointers) == state.problem.copies
    last = state.problem.inputs.tensors[-1]
    right = torch.nn.functional.scaled_dot_product_attention(last.q.float(), last.k.float(), last.v.float())
    torch.testing.assert_close(last.out.float(), right, rtol=2e-2, atol=2e-3)
