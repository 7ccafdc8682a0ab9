"""`LocalExecutor`: the `Executor` for one GPU of this machine, over a worker process that may die at any time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.core.errors import MeasureError
from flashgen.core.record import Baseline, Failure
from flashgen.measure.protocol import EvaluateJob, HostInfo, Outcome, RaceJob, RaceResult
from flashgen.measure.worker import Worker

GPU_SERVICE = "flashgen.measure.service:GpuService"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the worker may take, in seconds.

    `evaluate_s` covers building, the right answers of a new workload, and the short windows. A race may take
    `race_s`, and `slowdown` times what its windows should.
    """

    start_s: float = 180.0
    evaluate_s: float = 60.0
    race_s: float = 180.0
    slowdown: float = 3.0


class LocalExecutor:
    """Measures on one GPU; nothing is started before the first call."""

    def __init__(self, index: int = 0, *, service: str = GPU_SERVICE, patience: Patience | None = None) -> None:
        """An executor of GPU `index` of torch.

        Args:
            index: the GPU.
            service: `module:Class` of what runs in the worker.
            patience: when to give a candidate up.
        """
        self._patience = patience or Patience()
        self._worker = Worker(service, index, start_timeout_s=self._patience.start_s)

    def describe(self) -> HostInfo:
        """See `protocol.Executor.describe`."""
        found = self._worker.call("describe", timeout_s=self._patience.evaluate_s)
        if isinstance(found, HostInfo):
            return found
        raise MeasureError(f"a worker tells its device before it measures, and this one failed: {found}")

    def evaluate(self, job: EvaluateJob) -> Outcome:
        """See `protocol.Executor.evaluate`."""
        outcome: Outcome = self._worker.call("evaluate", job, timeout_s=self._patience.evaluate_s)
        return outcome

    def race(self, job: RaceJob) -> RaceResult:
        """See `protocol.Executor.race`. A config that ends a race is taken out, and the others race again."""
        outcomes: dict[int, Outcome] = {}
        baselines: tuple[Baseline, ...] = ()
        running = list(range(len(job.configs)))
        heat = job
        while running:
            result = self._worker.call("race", heat, timeout_s=self._race_s(heat))
            if isinstance(result, RaceResult):
                outcomes |= dict(zip(running, result.outcomes, strict=True))
                baselines = result.baselines
                break
            assert isinstance(result, Failure)
            culprit = self._worker.subject
            if culprit is None:  # the workload itself: nobody can race
                outcomes |= dict.fromkeys(running, result)
                break
            if culprit < len(running):
                outcomes[running.pop(culprit)] = result
                heat = heat.without(culprit) if running else heat
            elif heat.baselines:
                heat = replace(heat, baselines=False)
            else:
                outcomes |= dict.fromkeys(running, result)
                break
        return RaceResult(outcomes=tuple(outcomes[index] for index in range(len(job.configs))), baselines=baselines)

    def close(self) -> None:
        """See `protocol.Executor.close`."""
        self._worker.close()

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _race_s(self, job: RaceJob) -> float:
        return self._patience.race_s + self._patience.slowdown * job.windows_s
