"""What a race measures on a real GPU: the device's time, whatever the host takes, of backward passes, too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.impls import Call, Impl
from benchmarks.race import Pace, Result, race
from benchmarks.training_impls import BACKWARD, FORWARD_BACKWARD
from flashgen.core.workload import Workload
from flashgen.launch.gpu import current_device
from flashgen.measure import graph_capture
from flashgen.measure.baselines import sdpa_call
from flashgen.measure.inputs import Inputs
from flashgen.measure.timing import CudaStopwatch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHORT = Workload(batch=1, nheads=8, seqlen_q=1024, head_dim=64, causal=True)
BACK = Workload(direction="backward", batch=1, nheads=8, seqlen_q=1024, head_dim=64, causal=True)
SLEEP_S = 300e-6


def raced(workload: Workload, *impls: Impl) -> list[Result]:
    pace = Pace(warm_ms=20.0, window_ms=60.0, rounds=2)
    where = torch.device("cuda", 0)
    return race(workload, impls, device=current_device(), where=where, stopwatch=CudaStopwatch(), pace=pace)


def flash(name: str, before: Callable[[], object]) -> Impl:
    """torch's FlashAttention, with something that the host does in every call."""

    def prepare(workload: Workload, inputs: Inputs) -> Call:
        call = sdpa_call("sdpa-flash", workload)

        def run(n: int) -> torch.Tensor:
            before()
            return call.run(inputs.q[n], inputs.k[n], inputs.v[n])

        return Call(run=run, context=call.context)

    return Impl(name=name, version=lambda: "1", unsupported=lambda workload: None, prepare=prepare)


@pytest.mark.alone
def test_a_slow_host_costs_an_implementation_nothing() -> None:
    flag = torch.ones(1, device="cuda")
    quick, slow, waiting = raced(
        SHORT,
        flash("quick", lambda: None),
        flash("slow", lambda: time.sleep(SLEEP_S)),
        flash("waiting", lambda: time.sleep(SLEEP_S + 0 * flag.item())),  # no capture allows this
    )
    assert quick.reason is None
    assert (quick.timing, slow.timing) == ("graph", "graph")
    assert quick.median_ms < 1e3 * SLEEP_S / 3
    assert slow.median_ms == pytest.approx(quick.median_ms, rel=0.05)
    assert waiting.reason is not None
    assert waiting.reason.startswith("it cannot be recorded into a CUDA graph (")
    assert "the host takes" in waiting.reason


@pytest.mark.alone
@pytest.mark.parametrize("impls", [BACKWARD, FORWARD_BACKWARD], ids=["backward", "both"])
def test_backward_passes_are_recorded(impls: tuple[Impl, ...]) -> None:
    """Standard attention goes through autograd, which runs an op where its forward op ran."""
    wanted = [impl for impl in impls if impl.name in ("flashgen", "sdpa-flash", "sdpa-cudnn", "standard")]
    results = raced(BACK, *wanted)
    assert {(each.impl.name, each.timing, each.reason, each.queued_because) for each in results} == {
        (impl.name, "graph", None, None) for impl in wanted
    }
    assert all(0.002 < each.median_ms < 1.0 for each in results)


def test_torch_is_usable_after_a_capture_that_failed() -> None:
    stopwatch, tensor = CudaStopwatch(), torch.ones(4, device="cuda")
    before = torch.cuda.current_stream()

    def reads_back() -> None:
        tensor.normal_()
        tensor.sum().item()

    def breaks() -> None:
        torch.empty(1 << 20, device="cuda").normal_()
        raise ValueError("not today")

    for calls, error, message in ((reads_back, RuntimeError, "(?i)captur"), (breaks, ValueError, "not today")):
        with pytest.raises(error, match=message):
            stopwatch.capture(calls)
        assert torch.cuda.current_stream() == before
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.isfinite(tensor.normal_()).all()  # the default generator, which a capture had taken over
        tensor.fill_(1.0)
        replay = stopwatch.capture(lambda: tensor.add_(1.0))
        replay()
        replay()
        assert tensor.tolist() == [3.0] * 4


def test_an_abandoned_capture_keeps_no_memory() -> None:
    def takes_memory() -> None:
        held = torch.ones(1 << 26, device="cuda")
        held.sum().item()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.raises(RuntimeError):
        graph_capture.capture(takes_memory)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (32 << 20)
