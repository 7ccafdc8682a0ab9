"""Replay tables: what every config of a search space takes, so that searches can be compared without a GPU.

python -m benchmarks.replay_tables --workload KEY [--workload KEY] [--families hopper_forward] [--configs 400]
    [--limit-seconds 120] [--shard 0/4] --out FOLDER
python -m benchmarks.replay_tables --matrix 16 --configs 50 [--whole] [--limit-seconds 300] [--shard 0/4] --out FOLDER

What is measured goes to `FOLDER/replays.sqlite3` at once, in the order of the list; the same command goes on where it
stopped, and ends with 3 as long as something is left. Then the best of each workload race, and each workload has a file
`FOLDER/<key>.jsonl.gz` for `tuning_db/<device>/replays/`, of a matrix `<key>-matrix.jsonl.gz`. Kernels are compiled,
verified and timed as a search does it. Records are those of all GPUs of the architecture, so that a GPU without any has
a matrix, too. Several GPUs take a `--shard` of the workloads each, and a folder each.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.exit_codes import STOPPED
from benchmarks.provenance import add_shard_argument
from benchmarks.replay_plan import MATRIX, WHOLE, Plan, of_winners, searched, spread
from flashgen.codegen.families import family
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.record import Failure, Measurement, Trial, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.log_files import SUFFIX, write_log
from flashgen.db.store import Store
from flashgen.db.trials import search_logs
from flashgen.measure.protocol import EvaluateJob, Executor, RaceJob, specialization
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import Compiler, rejected, usable_cpus
from flashgen.tuning.context import Context, Options
from flashgen.tuning.finals import near_best
from flashgen.tuning.measured import DECODE_WARM_S, DECODE_WINDOW_S, DROP_FACTOR
from flashgen.tuning.notes import Evaluated, SearchNotes, not_measured
from flashgen.tuning.runs import make_compiler, make_executor
from flashgen.tuning.shards import Shard
from flashgen.tuning.tune import plain

RACE_SHARE = 0.15
"""How far behind the best a config may be to race, at the most `--race` of them."""

RACE_ROUNDS, RACE_WINDOW_S, RACE_WARM_S = 4, 0.03, 0.01
RACE_CONFIG_S = 0.75
"""About what a config of a race takes: verified before and behind it, and its windows on both kinds of data."""

SAY_EVERY_S = 10.0

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(contextlib.closing(make_executor(options.gpu)))
        device = executor.describe().device
        with Layers.open() as layers:
            records = [record for record, _ in layers.records(arch=device.arch, provenance="measured")]
        try:
            plans = planned(options, device, records)
        except FlashgenError as error:
            parser.error(str(error))
        compiler = stack.enter_context(make_compiler(device, options.jobs or usable_cpus()))
        store = stack.enter_context(Store.open(options.out / "replays.sqlite3"))
        table = Tables(store=store, executor=executor, compiler=compiler, race=options.race, say=_say)
        done = table.collect(plans, until=began + options.limit_seconds)
        for path in table.packed([plan.workload for plan in plans], options.out):
            _say(f"{path}: {path.stat().st_size / 1024:.0f} KB")
    return 0 if done else STOPPED


def planned(options: argparse.Namespace, device: Device, records: Sequence[TuningRecord]) -> list[Plan]:
    """What the options ask for, in their order.

    Raises:
        FlashgenError: a key or the shard is none, or no family applies.
    """
    named, shard = [Workload.parse(key) for key in options.workload], Shard.parse(options.shard)
    if options.matrix is not None:
        most, whole = options.configs or 50, options.whole
        usual = map(Workload.parse, WHOLE) if whole else spread(records, options.matrix)
        chosen = shard.of(named or list(usual)[: options.matrix])
        return [of_winners(workload, device, records, most, whole=whole) for workload in chosen]
    families = tuple(options.families.split(",")) if options.families else ()
    own = shard.of(named)
    fitting = {workload: _of_direction(families, workload) for workload in own}
    return [
        searched(
            workload,
            device,
            families=fitting[workload],
            configs=options.configs,
            seed=options.seed,
            records=records,
        )
        for workload in own
    ]


def _of_direction(families: tuple[str, ...], workload: Workload) -> tuple[str, ...]:
    """Of several workloads each takes the families of its pass."""
    return tuple(name for name in families if family(name).direction == workload.direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Measures plans one after the other into a database.

    `race` is the most configs of each workload that race when all were measured; 0 means none.
    """

    store: Store
    executor: Executor
    compiler: Compiler
    race: int
    say: Say
    clock: Callable[[], float] = time.monotonic

    def collect(self, plans: Sequence[Plan], until: float) -> bool:
        """Measure what is not there yet; False if the clock came to `until` before all was."""
        device = self.executor.describe().device
        kept = {plan.workload: self._kept(plan, device) for plan in plans}
        for plan in plans:
            for config, _ in plan.starts:
                if config not in kept[plan.workload]:
                    self.compiler.submit(specialization(plan.workload), config)
        ended = [
            self._one(plan, kept[plan.workload], self._share(plans[number:], until))
            for number, plan in enumerate(plans)
        ]
        return all(end or self._one(plan, kept[plan.workload], until) for end, plan in zip(ended, plans, strict=True))

    def _share(self, plans: Sequence[Plan], until: float) -> float:
        """When the first of several has to stop, so that a slow one leaves as much to the others; then it goes on."""
        return self.clock() + (until - self.clock()) / len(plans) if until < math.inf else until

    def packed(self, workloads: Sequence[Workload], folder: Path) -> list[Path]:
        """A file of each workload that has trials."""
        device = self.executor.describe().device
        found = []
        for log in search_logs(self.store, list(workloads), [device]):
            if log.search is not None and log.trials:
                kind = f"-{MATRIX}" if dict(log.search.settings).get("kind") == MATRIX else ""
                found.append(folder / f"{log.search.workload.key}{kind}{SUFFIX}")
                write_log(log, found[-1])
        return found

    def _kept(self, plan: Plan, device: Device) -> dict[Config, Trial]:
        trials = self.store.trials(plan.workload, device)
        return {trial.config: trial for trial in trials if trial.run == run_of(plan)}

    def _one(self, plan: Plan, kept: dict[Config, Trial], until: float) -> bool:
        host = self.executor.describe()
        context = Context(
            device=host.device,
            versions=plain(host.versions),
            store=self.store,
            compiler=self.compiler,
            budget=Budget(trials=len(plan.starts)),
            options=Options(families=plan.families),
            neighbours=lambda name: (),
            emit=lambda event: None,
            clock=self.clock,
            run=run_of(plan),
            host=host.hostname,
        )
        notes = SearchNotes(context, plan.workload)
        notes.begin(plan.candidates, host.state, kind=plan.kind, configs=len(plan.starts))
        measured = {c: t.outcome for c, t in kept.items() if isinstance(t.outcome, Measurement)}
        said = self.clock()
        for config, source in plan.starts:
            if config in kept:
                continue
            if self.clock() >= until:
                self.say(f"{plan.workload.key}: {len(kept)} of {len(plan.starts)} configs, stopped")
                return False
            found = self._evaluate(plan, config, measured)
            kept[config] = notes.trial(config, source, found, len(kept) + 1)
            if isinstance(found.outcome, Measurement):
                measured[config] = found.outcome
            if self.clock() - said >= SAY_EVERY_S:
                said = self.clock()
                self.say(f"{plan.workload.key}: {len(kept)} of {len(plan.starts)} configs")
        self.say(f"{plan.workload.key}: all {len(kept)} configs, {len(measured)} with times")
        return self._race(plan, measured, notes, until)

    def _evaluate(self, plan: Plan, config: Config, measured: dict[Config, Measurement]) -> Evaluated:
        compiled = self.compiler.result(specialization(plan.workload), config)
        reason = rejected(compiled, spill_limit_bytes=family(config.family).tolerated_spills)
        if isinstance(compiled, Failure) or reason is not None:
            return not_measured(compiled, reason)
        least_ms = min((each.median_ms for each in measured.values()), default=math.inf)
        windows = {"window_s": DECODE_WINDOW_S, "warm_s": DECODE_WARM_S} if plan.workload.is_decode else {}
        job = EvaluateJob(
            workload=plan.workload,
            config=config,
            drop_above_ms=None if least_ms == math.inf else DROP_FACTOR * least_ms,
            **windows,
        )
        began = self.clock()
        outcome = self.executor.evaluate(job)
        return Evaluated(outcome=outcome, compiled=compiled, evaluate_s=self.clock() - began)

    def _race(self, plan: Plan, measured: dict[Config, Measurement], notes: SearchNotes, until: float) -> bool:
        device = self.executor.describe().device
        raced = {each.config for each in self.store.finalists(plan.workload, device) if each.run == run_of(plan)}
        near = near_best(measured, share=RACE_SHARE, most=self.race)
        if raced.issuperset(near):  # else those of a longer list race, in place of the race of a shorter one
            return True
        if self.clock() + RACE_CONFIG_S * len(near) > until:
            self.say(f"{plan.workload.key}: no time is left for its race")
            return False
        job = RaceJob(
            workload=plan.workload,
            configs=near,
            rounds=RACE_ROUNDS,
            warm_s=RACE_WARM_S,
            window_s=RACE_WINDOW_S,
            reference=False,
            hard=True,
        )
        notes.race("near", job, self.executor.race(job))
        return True


def run_of(plan: Plan) -> str:
    """The run of a plan in the database: what is asked for twice goes on, whatever the number of configs."""
    return f"replay-{MATRIX if plan.kind == MATRIX else 'table'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.replay_tables", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", action="append", default=[], metavar="KEY", help="may be given several times")
    parser.add_argument("--families", default="", help="of these alone, by commas; those of other passes are left out")
    parser.add_argument("--configs", type=int, help="of each workload; all without, and 50 of a matrix")
    parser.add_argument("--matrix", type=int, metavar="W", help="W workloads by the configs that win most often")
    parser.add_argument(
        "--whole", action="store_true", help="of a matrix: as many configs of each of some usual workloads"
    )
    add_shard_argument(parser, into="folders of its own")
    parser.add_argument("--race", type=int, default=16, help="configs that race at the end (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="of all workloads, the start included")
    parser.add_argument("--seed", type=int, default=0, help="of the order behind the lists")
    parser.add_argument("--jobs", type=int, help="processes that compile; all CPUs but one without")
    parser.add_argument("--gpu", type=int, default=0, help="torch's number of the GPU (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder; what is there is gone on with")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
