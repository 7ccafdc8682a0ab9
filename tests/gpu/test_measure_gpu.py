"""What a number means on a real GPU, what a verification costs, and that the oracle is the same on both sides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from flashgen.codegen.families import default_config
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Workload
from flashgen.launch.gpu import current_device
from flashgen.measure import gpu
from flashgen.measure.bench import Bench, Candidate
from flashgen.measure.executor import LocalExecutor
from flashgen.measure.inputs import make_inputs
from flashgen.measure.protocol import EvaluateJob, RaceJob, specialization
from flashgen.measure.reference import oracle
from flashgen.measure.source import version_of_source
from flashgen.measure.timing import CudaStopwatch, make_unit, measure
from flashgen.measure.toolchain import GpuToolchain
from flashgen.measure.verify import Errors, check, oracle_of
from tests.eager import eager

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    with LocalExecutor() as made:
        yield made


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = current_device()
    stopwatch = CudaStopwatch(gpu.sm_clock_mhz)
    return Bench(device, torch.device("cuda", 0), GpuToolchain(device, 0), stopwatch, 8e9)


def test_the_device_is_the_one_that_the_executor_measures_on(executor: LocalExecutor) -> None:
    found = executor.describe()
    assert found.device == current_device()
    assert found.versions == replace(gpu.versions(), flashgen=version_of_source())
    assert found.device.num_sms == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize(
    "key",
    [
        "b2-h6-hk2-sq113-sk203-d64-causal",
        "b1-h2-s700-d128",
        "b1-h4-hk1-sq300-sk64-d64-causal",
        "b2-h4-hk2-sq200-sk300-d64-wl90-wr20-softcap-alibi-sink-bias-mask",
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_oracle_and_eager_agree_with_the_cpu(key: str, dtype: str) -> None:
    workload = Workload.parse(f"{dtype}-{key}")
    inputs = make_inputs(workload, copies=1, seed=5, device="cuda")
    on_gpu = (inputs.q[0], inputs.k[0], inputs.v[0])
    on_cpu = tuple(tensor.cpu() for tensor in on_gpu)
    features = {"causal": workload.causal, "features": inputs.features[0]}
    moved = [(name, getattr(inputs.features[0], name)) for name in ("alibi_slopes", "sinks", "bias", "mask")]
    changes = {name: tensor.cpu() for name, tensor in moved if tensor is not None}
    features_on_cpu = features | {"features": replace(inputs.features[0], **changes)}
    exact = oracle(*on_cpu, **features_on_cpu)
    for there, here in zip(oracle(*on_gpu, **features), exact, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-10, atol=1e-11)
    errors = [
        float((eager(*tensors, **given).cpu().double() - exact[0]).abs().mean())
        for tensors, given in ((on_gpu, features), (on_cpu, features_on_cpu))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.3)


def test_the_right_answer_passes_and_a_disturbed_one_does_not() -> None:
    workload = Workload.parse("bf16-b2-h8-hk2-s2048-d128-causal")
    inputs = make_inputs(workload, copies=1, seed=6, device="cuda")
    expected = oracle_of(inputs.q[0], inputs.k[0], inputs.v[0], causal=True)
    out, lse = expected.out.bfloat16(), expected.lse.float()
    assert isinstance(check(out, lse, expected), Errors)
    out[1, 3, 2000] *= 1.2
    failure = check(out, lse, expected)
    assert isinstance(failure, Failure)
    assert "batch 1, head 3, query 2000" in failure.reason


@pytest.mark.alone
@pytest.mark.parametrize(
    "key",
    [
        "bf16-b1-h16-s1024-d64",
        "bf16-b1-h16-s1024-d64-causal",
        "fp16-b2-h8-hk2-s2048-d128-causal",
        "bf16-b1-h8-hk1-sq64-sk4096-d128-causal",
        "bf16-b1-h8-s2048-d256",
        "bf16-b2-h32-hk8-sq1-sk8192-d128-causal",
    ],
)
def test_the_default_config_is_measured(executor: LocalExecutor, key: str) -> None:
    workload = Workload.parse(key)
    config = default_config(specialization(workload), executor.describe().device)
    found = executor.evaluate(EvaluateJob(workload=workload, config=config))
    assert isinstance(found, Measurement), found
    assert len(found.times_ms) == 3
    assert found.spread < 0.3
    assert 0 < found.mean_error < found.max_error < 0.1
    assert found.reference_ms is not None
    assert 0.05 < found.median_ms / found.reference_ms < 20


def test_a_recorded_graph_keeps_its_workspace() -> None:
    """At the next capture torch unmaps memory that is free: a replay would then be an illegal access."""

    def with_workspace() -> Callable[[int], object]:
        mine = torch.ones(1 << 26, device="cuda")  # large enough to be a segment of its own
        return lambda n: mine[: 1 << 10].add_(1)

    stopwatch = CudaStopwatch()
    first = make_unit(with_workspace(), 2, stopwatch)
    second = make_unit(with_workspace(), 2, stopwatch)
    assert first.calls > 1
    torch.cuda.empty_cache()
    for unit in (first, second, first):
        assert measure(unit, stopwatch, warm_ms=1.0, window_ms=5.0).ms > 0
    torch.cuda.synchronize()


@pytest.mark.alone
def test_verifying_another_candidate_is_cheap(bench: Bench) -> None:
    workload = Workload.parse("bf16-b4-h32-hk8-s4096-d128-causal")
    state = bench.state(workload)
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
    assert statistics.median(on_workload) < 0.1
    assert statistics.median(everything) < 0.2


@pytest.mark.alone
def test_a_short_kernel_is_timed_without_the_host() -> None:
    """One element takes a few us on any GPU; the same call through Python takes longer."""
    stopwatch = CudaStopwatch()
    tensors = [torch.zeros(1, device="cuda") for _ in range(4)]

    def run(n: int) -> None:
        for _ in range(5):  # the host needs several us for each
            tensors[n].add_(1.0)

    run(0)
    unit = make_unit(run, 4, stopwatch)
    assert unit.calls % 4 == 0
    window = measure(unit, stopwatch, warm_ms=2.0, window_ms=20.0)
    assert 0.001 < window.ms < 0.015  # 5 kernels of 1 to 3 us


@pytest.mark.alone
def test_a_long_kernel_is_timed_as_a_plain_loop_would() -> None:
    stopwatch = CudaStopwatch()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    unit = make_unit(lambda n: torch.mm(a, b, out=out), 1, stopwatch)
    assert unit.calls == 1
    window = measure(unit, stopwatch, warm_ms=50.0, window_ms=100.0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(100):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    assert window.ms == pytest.approx(1e3 * (time.perf_counter() - started) / 100, rel=0.15)


def test_inputs_are_rotated_over_twice_the_cache(bench: Bench) -> None:
    workload = Workload.parse("bf16-b1-h8-s1024-d64")
    state = bench.state(workload)
    assert state.problem.inputs.copies * workload.bytes >= 2 * current_device().l2_bytes
    pointers = {tensor.data_ptr() for tensor in state.problem.inputs.k}
    assert len(pointers) == state.problem.inputs.copies


@pytest.mark.alone
def test_the_same_config_twice_in_one_race_gets_the_same_time(executor: LocalExecutor) -> None:
    workload = Workload.parse("bf16-b1-h16-s4096-d128")
    config = default_config(specialization(workload), executor.describe().device)
    job = RaceJob(workload=workload, configs=(config, config), rounds=4, warm_s=0.1, window_s=0.2, baselines=True)
    result = executor.race(job)
    first, second = result.outcomes
    assert isinstance(first, Measurement), first
    assert isinstance(second, Measurement), second
    assert first.median_ms == pytest.approx(second.median_ms, rel=0.03)
    times = {baseline.impl: baseline.median_ms for baseline in result.baselines}
    assert {"sdpa-flash", "sdpa-cudnn"} <= times.keys()
    assert first.reference_ms == times["sdpa-flash"]
    if gpu.sm_clock_mhz() is not None:
        assert first.sm_clock_mhz is not None
        assert 200 < first.sm_clock_mhz < 4000


@pytest.mark.parametrize(
    ("key", "present", "absent"),
    [
        ("bf16-b1-h4-sq64-sk256-d64-causal", {"sdpa-flash"}, {"sdpa-cudnn"}),
        ("bf16-b1-h8-hk2-s512-d64-causal", {"sdpa-flash"}, set()),
        ("bf16-b1-h8-hk2-sq1-sk512-d64-causal", {"sdpa-flash"}, set()),
        ("bf16-b1-h2-sq256-sk64-d64-causal", set(), {"sdpa-cudnn"}),
    ],
)
def test_an_anchor_computes_the_same_function_or_is_absent(
    bench: Bench, key: str, present: set[str], absent: set[str]
) -> None:
    state = bench.state(Workload.parse(key))
    able = {impl for impl in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient") if bench.sdpa(state, impl) is not None}
    assert present <= able
    assert not absent & able
