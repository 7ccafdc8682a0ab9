"""Races on a fake clock without a GPU: who runs in them, their workloads, and modules that nobody has installed."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from benchmarks.impls import Call, Impl
from benchmarks.race import Pace, Result, race
from flashgen.core.device import CATALOGUE
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.inputs import Inputs
from flashgen.measure.reference import oracle

SQUARE = Workload(batch=2, nheads=2, seqlen_q=96, head_dim=32, causal=True)
CPU = torch.device("cpu")
PACE = Pace(warm_ms=10.0, window_ms=20.0, rounds=4, settle_ms=0.0)


@dataclass
class FakeGpu:
    """Device time that calls add to; the host's time of a launch counts unless it comes from a graph.

    `visits` has the start of every window that had a warm-up.
    """

    now_ms: float = 0.0
    running: str = ""
    visits: list[tuple[str, float, float]] = field(default_factory=list)
    in_graph: bool = False
    launch_ms: float = 0.0
    on_side_stream: bool = False

    def call(self, name: str, ms: float, host_ms: float = 0.0, *, can_be_captured: bool = True) -> None:
        if self.in_graph and not can_be_captured:
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        self.running = name
        self.launch_ms += host_ms
        self.now_ms += ms if self.in_graph else max(ms, host_ms)

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        start = self.now_ms
        warm()
        begun = self.now_ms
        measured()
        if begun > start:
            self.visits.append((self.running, begun - start, self.now_ms - begun))
        return self.now_ms - begun

    def capture(self, calls: Callable[[], object]) -> Callable[[], object]:
        def replay() -> None:
            self.in_graph = True
            try:
                calls()
            finally:
                self.in_graph = False

        assert self.on_side_stream
        before = self.now_ms
        replay()
        self.now_ms = before
        return replay

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        self.on_side_stream = True
        yield
        self.on_side_stream = False

    def host_ms(self, call: Callable[[], object]) -> float:
        self.launch_ms = 0.0
        call()
        return self.launch_ms

    def sm_clock_mhz(self) -> float | None:
        return None


def impl_of(
    gpu: FakeGpu,
    name: str,
    ms: float,
    *,
    share: float = 1.0,
    error: float = 0.0,
    fail_at: int = 0,
    host_ms: float = 0.0,
    can_be_captured: bool = True,
) -> Impl:
    """Right but for `error`; takes `ms`, and raises at its `fail_at`-th call."""

    def prepare(workload: Workload, inputs: Inputs) -> Call:
        assert gpu.on_side_stream  # a backward pass is recorded on the stream of its forward pass
        right = oracle(inputs.q[0], inputs.k[0], inputs.v[0], causal=workload.causal)[0]
        calls = 0

        def run(n: int) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise RuntimeError("it broke\nin detail")
            gpu.call(name, ms, host_ms, can_be_captured=can_be_captured)
            return right * (1 + error)

        return Call(run=run)

    return Impl(name=name, version=lambda: "1", unsupported=lambda workload: None, prepare=prepare, share=share)


def raced(gpu: FakeGpu, *entrants: Impl, data: str = NORMAL) -> list[Result]:
    return race(SQUARE, entrants, device=CATALOGUE[0], where=CPU, stopwatch=gpu, pace=PACE, data=data)


def close(call: Call, workload: Workload, inputs: Inputs) -> None:
    right = oracle(inputs.q[1], inputs.k[1], inputs.v[1], causal=workload.causal, features=inputs.features[1])[0]
    out = call.run(1)
    assert out.shape == right.shape
    assert float((out.double() - right).norm() / right.norm()) < 0.02


FEATURES = [
    Workload.parse(f"b2-h4-hk2-sq96-sk160-d32-{tokens}")
    for tokens in (
        "causal-wl40",
        "wl40-wr7",
        "softcap-alibi",
        "causal-sink",
        "bias",
        "keybias-causal",
        "mask-causal",
        "keymask",
    )
]


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str) -> types.ModuleType:
    """An empty module that is found under this name."""
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, name, module)
    return module
