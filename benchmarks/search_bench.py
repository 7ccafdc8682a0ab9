"""What benchmarks of searches share: what they measure on, the file that a run goes on with, and their races."""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.provenance import add_results_arguments
from benchmarks.search_files import add_rows, file_of, read, stamp_of
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.measure.protocol import SETTLE_S, Executor, RaceJob, specialization
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import Compiler, usable_cpus
from flashgen.tuning.context import Context, Neighbours, Options, lookahead
from flashgen.tuning.events import OnEvent
from flashgen.tuning.learned_cost import LearnedCost
from flashgen.tuning.runs import make_compiler, make_executor
from flashgen.tuning.tune import new_run, plain

ROUNDS, WINDOW_S, WARM_S = 8, 0.1, 0.03
"""Of a race, after which a ratio of two configs is known to 1%."""

AFTER_S = 12.0
"""About what a shape takes behind its search: configs that are compiled for the race, and that."""


def add_run_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Add what every run of searches takes: its limit, processes, GPU, the folder of databases (`out`), the results."""
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="of all, the start included")
    parser.add_argument("--jobs", type=int, help="processes that compile; all CPUs but one without")
    parser.add_argument("--gpu", type=int, default=0, help="torch's number of the GPU (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help=out)
    add_results_arguments(parser)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A GPU, what compiles for it in `jobs` processes, the known records, and the file whose rows have a `stamp`."""

    path: Path
    executor: Executor
    compiler: Compiler
    layers: Layers
    jobs: int
    stamp: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = _say
    clock: Callable[[], float] = time.monotonic

    @classmethod
    @contextlib.contextmanager
    def open(cls, parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> Iterator[Bench]:
        """Open what the options of `add_run_arguments` name, and the file of that name among the results of the GPU.

        A command line that is wrong ends with the parser's error.
        """
        options.out.mkdir(parents=True, exist_ok=True)
        jobs = options.jobs or usable_cpus()
        with contextlib.closing(make_executor(options.gpu)) as executor:
            host = executor.describe()
            try:
                stamp = stamp_of(host, options.commit)
                path = file_of(options.results, host, name, stamp)
            except ValueError as error:
                parser.error(str(error))
            with Layers.open() as layers, make_compiler(host.device, jobs) as compiler:
                yield cls(path=path, executor=executor, compiler=compiler, layers=layers, jobs=jobs, stamp=stamp)

    @property
    def device(self) -> Device:
        """That is measured on."""
        return self.executor.describe().device

    def left(self, workloads: Iterable[Workload]) -> list[Workload]:
        """Those of which the file has no row."""
        done = {row["workload"] for row in read(self.path)}
        return [workload for workload in workloads if workload.key not in done]

    def add(self, columns: Sequence[str], rows: Sequence[Mapping[str, object]], said: str = "done") -> None:
        """Add all rows of a workload at once, with the stamp, and say so."""
        add_rows(self.path, (*columns, *self.stamp), [{**row, **self.stamp} for row in rows])
        self.say(f"{rows[0]['workload']}: {said}")

    def neighbours(self, workload_class: str) -> list[TuningRecord]:
        """The known records of a class of workloads, of any device and layer."""
        return [record for record, _ in self.layers.records(specialization=workload_class)]

    def judge(self, workload: Workload) -> TuningRecord | None:
        """The measured record beside which a search is judged: of the device, else of another one of its architecture.

        Its config is timed on the device in any case; its own time is of no use there.
        """
        device = self.device
        found = self.layers.record(workload, device, provenance="measured")
        if found is not None:
            return found[0]
        others = self.layers.records(
            arch=device.arch, specialization=workload.specialization.workload_class, provenance="measured"
        )
        return next((record for record, _ in others if record.workload == workload), None)

    def context(
        self,
        store: Store,
        *,
        budget: Budget,
        options: Options,
        neighbours: Neighbours | None = None,
        learned: LearnedCost | None = None,
        emit: OnEvent = lambda event: None,
    ) -> Context:
        """A run of `tune_one` of its own; it looks as far ahead as `jobs` ask for, and asks `neighbours` by default."""
        host = self.executor.describe()
        return Context(
            device=host.device,
            versions=plain(host.versions),
            store=store,
            compiler=self.compiler,
            budget=budget,
            options=replace(options, lookahead=lookahead(self.jobs)),
            neighbours=neighbours or self.neighbours,
            emit=emit,
            clock=self.clock,
            run=new_run(),
            host=host.hostname,
            learned=learned,
        )


def raced(
    executor: Executor,
    compiler: Compiler,
    workload: Workload,
    configs: Iterable[Config],
    *,
    rounds: int = ROUNDS,
    window_s: float = WINDOW_S,
    warm_s: float = WARM_S,
    settle_s: float = SETTLE_S,
    hard: bool = False,
) -> dict[Config, Measurement | Failure]:
    """What each config did in one race of all of them, for which they are compiled first; the rest as of `RaceJob`."""
    different = tuple(dict.fromkeys(configs))
    for config in different:
        compiler.submit(specialization(workload), config)
    for config in different:
        compiler.result(specialization(workload), config)
    job = RaceJob(
        workload=workload,
        configs=different,
        rounds=rounds,
        window_s=window_s,
        warm_s=warm_s,
        settle_s=settle_s,
        hard=hard,
    )
    return dict(zip(different, executor.race(job).outcomes, strict=True))


def raced_row(
    workload: Workload,
    way: str,
    config: Config | None,
    outcomes: Mapping[Config, Measurement | Failure],
    beside: Iterable[Config | None],
) -> dict[str, object]:
    """The time of a config in a race, and that over the best of `beside`, or why it has none; None is no config."""
    times = {each: found.times_ms for each, found in outcomes.items() if isinstance(found, Measurement)}
    own = times.get(config, ()) if config else ()
    every = [times[each] for each in beside if each in times]
    found = outcomes.get(config) if config else None
    return {
        "workload": workload.key,
        "direction": workload.direction,
        "way": way,
        "ms": f"{statistics.median(own):.5f}" if own else "",
        "ratio": f"{ratio(own, every):.4f}" if own and every else "",
        "family": config.family if config else "",
        "knobs": config.to_json() if config else "",
        "outcome": str(found) if isinstance(found, Failure) else "" if own else "nothing was found",
    }


def ratio(own: Sequence[float], every: Sequence[Sequence[float]]) -> float:
    """The time over that of the best of the race: the median over rounds of the ratio to the fastest config."""
    best = min(every, key=statistics.median)
    return statistics.median(a / b for a, b in zip(own, best, strict=True))
