"""What a call without a record loses: by the rule, by the nearest record, by the default, beside a search of 10 s.

python -m benchmarks.fallback --out FOLDER [--rules FILE] [--workload KEY] [--budget 10s] [--limit-seconds 900]

Each shape of `UNSEEN`, which no record has, is tuned in a database of its own, without a record of it; then what serves
it by the rule and by the nearest record, the default and the winner race each other. `--rules` takes the trees of a
file of `flashgen db learn`, also those that do not serve; without it the shipped rules are raced as they serve.

Rows go to `results/<device>/fallback.csv` when a shape is done, so that the same command goes on where it stopped, and
searches to a database in FOLDER; it ends with 3 as long as something is left, and prints how far each is behind the
best of the race.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.exit_codes import STOPPED
from benchmarks.markdown import table_row
from benchmarks.search_files import FALLBACK, add_rows, add_run_arguments, opened, read
from flashgen.codegen.families import default_config, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.measure.protocol import Executor, RaceJob, specialization
from flashgen.runtime.lookup.ladder import NEAREST_HERE, Served, resolve
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.lookup.rules import Rule, answers, read_rules, shipped_rules
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import Compiler, usable_cpus
from flashgen.tuning.context import Context, Options, lookahead
from flashgen.tuning.runs import make_compiler, make_executor
from flashgen.tuning.tune import new_run, plain, tune_one

RULE, NEAREST, DEFAULT, TUNED = "rule", "nearest", "default", "tuned"
WAYS = (RULE, NEAREST, DEFAULT, TUNED)

ROUNDS, WINDOW_S, WARM_S = 8, 0.1, 0.03
"""Of a race, after which a ratio of two configs is known to 1%."""

AFTER_S = 12.0
"""About what a shape takes behind its search: configs that are compiled for the race, and that."""

GOAL_MEAN, GOAL_WORST = 1.01, 1.05

COLUMNS = ("workload", "direction", "way", "ms", "ratio", "rung", "record", "expected", "family", "knobs", "outcome")

UNSEEN = (
    "b2-h24-s3072-d128-causal",
    "b1-h40-s6144-d128-causal",
    "b6-h32-hk8-s1536-d128-causal",
    "b1-h64-hk8-s12288-d128-causal",
    "b3-h16-sq700-sk5000-d128-causal",
    "b3-h20-s2560-d128",
    "b1-h12-s10240-d128",
    "fp16-b5-h24-s3000-d128-causal",
    "b2-h32-s6144-d64-causal",
    "b12-h12-s1536-d64-causal",
    "b1-h64-hk8-s3072-d64-causal",
    "b24-h16-s384-d64",
    "b3-h24-s5120-d64",
    "fp16-b2-h20-s3072-d64",
    "b3-h8-s3072-d256-causal",
    "b1-h16-s6144-d256",
    "b2-h32-hk8-s6144-d128-causal-wl1500",
    "b1-h32-hk8-s12288-d128-causal-wl3000",
    "bwd-b2-h24-s3072-d128-causal",
    "bwd-b1-h32-hk8-s6144-d128-causal",
    "bwd-b6-h20-s1536-d128-causal",
    "bwd-b3-h20-s2560-d128",
    "bwd-b2-h32-s6144-d64-causal",
    "bwd-b12-h12-s1536-d64-causal",
    "bwd-b5-h24-s3072-d64",
    "bwd-b3-h8-s3072-d256-causal",
    "bwd-b1-h16-s6144-d256",
)
"""Shapes between and beside those that are tuned, of classes that have records."""

FILE = FALLBACK

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What serves a workload without a record: by the rules, by the nearest record, and by default."""

    rule: Served
    nearest: Served
    default: Config

    @classmethod
    def of(cls, workload: Workload, device: Device, ruled: Records, unruled: Records) -> Ways:
        """Ask the ladder with rules and without.

        Raises:
            UnsupportedError: no family supports the workload.
            ValueError: it has a record, so that this says nothing of calls without one.
        """
        spec = specialization(workload)
        served = resolve(workload, spec, device, ruled)
        if served.is_exact:
            raise ValueError(
                f"a shape that nobody has seen has no record, and {workload.key} has one in {served.layer}"
            )
        default = usual(default_config(spec, device), spec, Sizes.of(workload), device)
        return cls(rule=served, nearest=resolve(workload, spec, device, unruled), default=default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Tunes and races one workload after the other, and writes what came out."""

    path: Path
    executor: Executor
    compiler: Compiler
    store: Store
    layers: Layers
    rules: dict[str, Rule] | None
    budget: Budget
    say: Say
    options: Options = field(default_factory=Options)
    stamp: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def run(self, workloads: Sequence[Workload], until: float) -> bool:
        """Do what is not in the file yet; False if the clock came to `until` before all was."""
        device = self.executor.describe().device
        ruled = Records(self.layers, shipped_rules if self.rules is None else lambda _: self.rules or {})
        unruled = Records(self.layers, lambda _: {})
        done = {row["workload"] for row in read(self.path)}
        for workload in workloads:
            if workload.key in done:
                continue
            if self.clock() + (self.budget.seconds or 0.0) + AFTER_S > until:
                return False
            ways = Ways.of(workload, device, ruled, unruled)
            winner = self._tuned(workload)
            add_rows(self.path, (*COLUMNS, *self.stamp), self._raced(workload, ways, winner))
            self.say(f"{workload.key}: done")
        return True

    def _tuned(self, workload: Workload) -> Config | None:
        """The winner of a search, or of the one that a stopped run has made; None where none works."""
        host = self.executor.describe()
        context = Context(
            device=host.device,
            versions=plain(host.versions),
            store=self.store,
            compiler=self.compiler,
            budget=self.budget,
            options=self.options,
            neighbours=lambda name: [record for record, _ in self.layers.records(specialization=name)],
            emit=lambda event: None,
            clock=self.clock,
            run=new_run(),
            host=host.hostname,
        )
        record = tune_one(context, self.executor, workload, ()).record
        return record.config if record is not None else None

    def _raced(self, workload: Workload, ways: Ways, winner: Config | None) -> list[dict[str, object]]:
        by_way = {RULE: ways.rule.config, NEAREST: ways.nearest.config, DEFAULT: ways.default}
        if winner is not None:
            by_way[TUNED] = winner
        outcomes = raced(self.executor, self.compiler, workload, by_way.values())
        times = {config: each.times_ms for config, each in outcomes.items() if isinstance(each, Measurement)}
        found = []
        for way, config in by_way.items():
            served = {RULE: ways.rule, NEAREST: ways.nearest}.get(way)
            measured = config in times
            cells = (
                workload.key,
                workload.direction,
                way,
                f"{statistics.median(times[config]):.5f}" if measured else "",
                f"{ratio(times[config], list(times.values())):.4f}" if measured else "",
                served.rung if served else "",
                served.record.workload.key if served and served.record else "",
                _expected(served, workload),
                config.family,
                config.to_json(),
                "" if measured else str(outcomes[config]),
            )
            found.append({**dict(zip(COLUMNS, cells, strict=True)), **self.stamp})
        return found


def raced(
    executor: Executor,
    compiler: Compiler,
    workload: Workload,
    configs: Iterable[Config],
    *,
    rounds: int = ROUNDS,
    window_s: float = WINDOW_S,
    warm_s: float = WARM_S,
    hard: bool = False,
) -> dict[Config, Measurement | Failure]:
    """What each config did in one race of all of them, for which they are compiled first; the rest as of `RaceJob`."""
    different = tuple(dict.fromkeys(configs))
    for config in different:
        compiler.submit(specialization(workload), config)
    for config in different:
        compiler.result(specialization(workload), config)
    job = RaceJob(workload=workload, configs=different, rounds=rounds, window_s=window_s, warm_s=warm_s, hard=hard)
    return dict(zip(different, executor.race(job).outcomes, strict=True))


def _expected(served: Served | None, workload: Workload) -> str:
    """What `explain` would say that the rule's choice costs."""
    if served is None or served.rule is None or served.rung != NEAREST_HERE:
        return ""
    leaf = served.rule.leaf(answers(Sizes.of(workload)))
    expected = leaf.expected if leaf is not None and leaf.config == served.config else served.rule.nearest
    return f"{expected.mean:.4f}" if expected else ""


def ratio(own: Sequence[float], every: Sequence[Sequence[float]]) -> float:
    """The time over that of the best of the race: the median over rounds of the ratio to the fastest config."""
    best = min(every, key=statistics.median)
    return statistics.median(a / b for a, b in zip(own, best, strict=True))


def page(rows: Sequence[dict[str, str]]) -> str:
    """How far each way is behind the best of its races, forward, backward and all, in Markdown."""
    lines = [
        f"Time over that of the best config of the race: geometric mean and, in brackets, the worst. The goal of the "
        f"rule is {GOAL_MEAN} and {GOAL_WORST}.",
        "",
        table_row(["pass", "shapes", *WAYS]),
        table_row(["---"] * (2 + len(WAYS))),
    ]
    for name, directions in (("forward", ("forward",)), ("backward", ("backward",)), ("all", ("forward", "backward"))):
        own = [row for row in rows if row["direction"] in directions and row["ratio"]]
        shapes = len({row["workload"] for row in own})
        cells = [cell([float(row["ratio"]) for row in own if row["way"] == way]) for way in WAYS]
        lines.append(table_row([name, str(shapes), *cells]))
    return "\n".join(lines) + "\n"


def cell(ratios: Sequence[float]) -> str:
    """Geometric mean and worst."""
    return f"{statistics.geometric_mean(ratios):.3f} ({max(ratios):.3f})" if ratios else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        workloads = [Workload.parse(key) for key in options.workload or UNSEEN]
        rules = read_rules(options.rules, every=True)[1] if options.rules else None
        budget = Budget.parse(options.budget)
    except FlashgenError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = options.jobs or usable_cpus()
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(contextlib.closing(make_executor(options.gpu)))
        host = executor.describe()
        device = host.device
        path, stamp = opened(parser, options, host, FILE)
        checks = Checks(
            path=path,
            executor=executor,
            compiler=stack.enter_context(make_compiler(device, jobs)),
            store=stack.enter_context(Store.open(options.out / "fallback.sqlite3")),
            layers=stack.enter_context(Layers.open()),
            rules=rules,
            budget=budget,
            say=_say,
            options=Options(lookahead=lookahead(jobs)),
            stamp=stamp,
        )
        try:
            done = checks.run(workloads, until=began + options.limit_seconds)
        except ValueError as error:
            parser.error(str(error))
    print(page(read(path)))
    return 0 if done else STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.fallback", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", action="append", default=[], metavar="KEY", help="in place of the usual shapes")
    parser.add_argument(
        "--rules", type=Path, help="a file of flashgen db learn, whose trees are raced whether they serve or not"
    )
    parser.add_argument("--budget", default="10s", help="of each search (default: %(default)s)")
    add_run_arguments(parser, out="a folder for the searches' database")
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
