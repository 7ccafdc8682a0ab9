"""An executor and a compiler that need no GPU: a rugged time model with noise, drift, faults and a fake clock."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flashgen.codegen.cost import Tiling
from flashgen.codegen.families import default_config
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.record import Baseline, Failure, Measurement, Versions
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import EvaluateJob, HostInfo, Outcome, RaceJob, RaceResult
from flashgen.measure.sequential import ANCHOR_ROUNDS, Referee
from flashgen.tuning.predict import cost_model

H200 = find_device("h200")
GH200 = replace(H200, name="NVIDIA GH200 480GB", memory_gb=96)
"""Of the H200's architecture, and without records of its own: those of an H100 come first."""

REFERENCE_MS = 0.7
UNKNOWN = 3.0


def chance(*parts: object) -> float:
    """Drawn by the parts; a config without shared keys is the one that it was before there were any."""
    text = "/".join(str(part) for part in parts).replace("split_keys=False, ", "")
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def true_ms(workload: Workload, config: Config) -> float:
    """The time without noise: a smooth best near 128 x 64 with 8 warps and 3 stages, and 20 per cent of ruggedness."""
    spec = workload.specialization
    model = cost_model(config)
    tiles = [kernel.tile(spec, config) for kernel in model.kernels] if model else []
    # whatever a family without a cost model computes, it is slower than the others and has a best config of its own
    factor = math.prod(_slower(tile) ** (1 / len(tiles)) for tile in tiles) if tiles else UNKNOWN
    return workload.flops / 500e9 * factor * (1 + 0.2 * chance("rugged", spec.key, config))


def _slower(tile: Tiling) -> float:
    factor = 1 + 0.4 * abs(math.log2(tile.block_m / 128)) + 0.3 * abs(math.log2(tile.block_n / 64))
    factor *= 1 + 0.2 * abs(math.log2(tile.warps * 16 / tile.block_m)) + 0.05 * abs(tile.stages - 3)
    return factor * (1.1 if tile.pointer_loads else 1.0)


@dataclass
class Clock:
    """Seconds that pass only when something says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeCompiler:
    """Every candidate compiles at once, except the shares that fail, spill or do not fit; small ones spare defaults."""

    failing: float = 0.05
    spilling: float = 0.1
    submitted: list[tuple[Specialization, Config]] = field(default_factory=list)

    def submit(self, spec: Specialization, config: Config) -> None:
        if (spec, config) not in self.submitted:
            self.submitted.append((spec, config))

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        self.submit(spec, config)
        usual = config == default_config(spec, H200) and max(self.failing, self.spilling) < 1
        if chance("build", spec.key, config) < self.failing and not usual:
            return Failure(stage="build", reason="planted")
        spills = 1000 if chance("spills", spec.key, config) < self.spilling and not usual else 0
        return Compiled(registers=128, spills=spills, shared_bytes=65536, occupancy=1, source_digest="d")


@dataclass
class FakeExecutor:
    """Times `true_ms` with noise of a given size and a slow drift that the reference kernel shares.

    `on_evaluate` is called before the n-th evaluation (from 0) and may raise; `broken` says why a config fails;
    `hard_factor` how many times as long it takes on hard data.
    """

    clock: Clock = field(default_factory=Clock)
    noise: float = 0.004
    seed: int = 0
    device: Device = H200
    evaluate_s: float = 0.4
    others: tuple[str, ...] = ()
    on_evaluate: Callable[[int], None] = lambda number: None
    broken: Callable[[Config], Failure | None] = lambda config: None
    broken_in_race: Callable[[Config], Failure | None] = lambda config: None
    time_ms: Callable[[Workload, Config], float] = true_ms
    hard_factor: Callable[[Config], float] = lambda config: 1.0
    versions: Versions = field(
        default_factory=lambda: Versions(flashgen="0", triton="3.6.0", torch="2.11", driver="580")
    )
    state: tuple[tuple[str, float], ...] = ()
    evaluated: list[tuple[Workload, Config]] = field(default_factory=list)
    races: list[RaceJob] = field(default_factory=list)
    calls: int = 0

    def describe(self) -> HostInfo:
        return HostInfo(
            device=self.device,
            versions=self.versions,
            other_processes=self.others,
            hostname="gpu-7",
            state=self.state,
        )

    def evaluate(self, job: EvaluateJob) -> Outcome:
        self.on_evaluate(len(self.evaluated))
        self.clock.now += self.evaluate_s
        self.evaluated.append((job.workload, job.config))
        failure = self.broken(job.config)
        if failure is not None:
            return failure
        time = self.time_ms(job.workload, job.config)
        if job.drop_above_ms is not None and time > job.drop_above_ms:
            return Measurement(times_ms=(time,))
        drift = 1 + 0.1 * math.sin(len(self.evaluated) / 7)
        times = tuple(drift * time * self._noise() for _ in range(3))
        return Measurement(times_ms=times, max_error=1e-3, mean_error=1e-4, reference_ms=drift * REFERENCE_MS)

    def race(self, job: RaceJob) -> RaceResult:
        self.races.append(job)
        failures = {config: self.broken_in_race(config) for config in job.configs}
        racers = [config for config in job.configs if failures[config] is None]
        times: list[list[float]] = [[] for _ in racers]
        hard: list[list[float]] = [[] for _ in racers]
        referee = self._referee(job, racers)
        racing = list(range(len(racers)))
        for number in range(job.rounds if racers else 0):
            self.clock.now += len(racing) * job.windows / len(job.configs) * (job.warm_s + job.window_s)
            drift = 1 + 0.05 * math.cos(number)
            for index in racing:
                time = drift * self.time_ms(job.workload, racers[index])
                times[index].append(time * self._noise())
                if job.hard:
                    hard[index].append(self.hard_factor(racers[index]) * time * self._noise())
            if referee is not None:
                pairs = zip(times, hard, strict=True)
                racing = referee([[math.sqrt(a * b) for a, b in zip(t, h or t, strict=True)] for t, h in pairs])
            if not racing:
                break
        others = (3 if job.baselines else 1) * min(job.rounds, ANCHOR_ROUNDS)
        self.clock.now += others * (job.warm_s + job.window_s)
        measured = iter(
            Measurement(times_ms=tuple(t), reference_ms=REFERENCE_MS, sm_clock_mhz=1700.0, hard_times_ms=tuple(h))
            for t, h in zip(times, hard, strict=True)
        )
        outcomes: list[Outcome] = [failures[config] or next(measured) for config in job.configs]
        flash = Baseline(impl="sdpa-flash", median_ms=job.workload.flops / 345e9)
        cudnn = Baseline(impl="sdpa-cudnn", median_ms=job.workload.flops / 600e9)
        return RaceResult(outcomes=tuple(outcomes), baselines=(flash, cudnn) if job.baselines else ())

    def _referee(self, job: RaceJob, racers: list[Config]) -> Referee | None:
        rule = job.rule
        if rule is None:
            return None
        for index in reversed([n for n, config in enumerate(job.configs) if config not in racers]):
            rule = rule.without(index)
        return Referee(rule, range(len(racers)), lambda both: both, self.clock)

    def close(self) -> None:
        return

    def _noise(self) -> float:
        self.calls += 1
        return 1 + self.noise * (2 * chance("noise", self.seed, self.calls) - 1)
