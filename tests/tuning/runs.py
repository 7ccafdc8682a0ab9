"""A search or a ranking on a fake GPU and a real database, in one call."""

from __future__ import annotations

from flashgen.core.device import find_device
from flashgen.core.record import TuningRecord, Versions
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, RunFinished
from flashgen.tuning.finals import Finals
from flashgen.tuning.tune import tune
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor

CAUSAL = Workload(batch=1, nheads=32, nheads_k=8, seqlen_q=4096, head_dim=128, causal=True)
LONGER = CAUSAL.with_shape(seqlen_q=8192, seqlen_k=8192)
PLAIN = Workload(batch=2, nheads=12, seqlen_q=1024, head_dim=64)
FINALS = Finals(rounds=3)


class Killed(BaseException):
    """Stands for kill -9: nothing of the run sees it coming or cleans up after it."""


TWO_FAMILIES = ("hopper_forward", "portable_forward")


def run(
    store: Store,
    *workloads: Workload,
    executor: FakeExecutor | None = None,
    compiler: FakeCompiler | None = None,
    budget: Budget | None = None,
    events: list[Event] | None = None,
    **options: object,
) -> RunFinished:
    executor = executor or FakeExecutor()
    told = events if events is not None else []
    return tune(
        workloads or (CAUSAL,),
        device=H200,
        store=store,
        compiler=compiler or FakeCompiler(),
        executor=executor,
        budget=budget or Budget(trials=30),
        options=Options(**{"finals": FINALS, **options}),  # type: ignore[arg-type]
        on_event=told.append,
        clock=executor.clock,
    )


def chosen(store: Store, workload: Workload = CAUSAL) -> TuningRecord:
    record = store.record(workload, H200)
    assert record is not None
    return record


def willing() -> FakeCompiler:
    return FakeCompiler(failing=0.0, spilling=0.0)


def predicted(store: Store, *workloads: Workload, target: str = "h100", **changes: object) -> RunFinished:
    values = {"budget": Budget(trials=25), "compiler": FakeCompiler(), "options": Options(), **changes}
    return tune(
        workloads or (CAUSAL,),
        device=find_device(target),
        store=store,
        executor=None,
        versions=Versions(triton="3.7.1"),
        **values,  # type: ignore[arg-type]
    )
