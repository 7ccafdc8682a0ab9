"""A run in a process of its own, slow enough to be killed in the middle: `main()` with a database path as argument."""

from __future__ import annotations

import sys
import time

from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.tune import tune
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor

WORKLOAD = Workload(batch=1, nheads=32, nheads_k=8, seqlen_q=4096, head_dim=128, causal=True)


def main() -> None:
    executor = FakeExecutor(on_evaluate=lambda number: time.sleep(0.2))
    with Store.open(sys.argv[1]) as store:
        tune(
            [WORKLOAD],
            device=H200,
            store=store,
            compiler=FakeCompiler(),
            executor=executor,
            budget=Budget(trials=1000),
        )
