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
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.exit_codes import STOPPED
from benchmarks.markdown import table_row
from benchmarks.search_bench import AFTER_S, Bench, add_run_arguments, raced, raced_row
from benchmarks.search_files import FALLBACK, read
from flashgen.codegen.families import default_config, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.ladder import NEAREST_HERE, Served, resolve
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.lookup.rules import Rule, answers, read_rules, shipped_rules
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.tune import tune_one

RULE, NEAREST, DEFAULT, TUNED = "rule", "nearest", "default", "tuned"
WAYS = (RULE, NEAREST, DEFAULT, TUNED)

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
    "b1-h24-s5000-d128-causal",
    "b4-h12-s2500-d128-causal",
    "b2-h40-hk8-s3500-d128-causal",
    "b1-h20-s10000-d128-causal",
    "fp16-b2-h32-s5000-d128-causal",
    "b2-h20-s4500-d64-causal",
    "b1-h48-hk8-s7000-d64-causal",
    "b6-h16-s1800-d64-causal",
    "fp16-b3-h16-s4000-d64-causal",
    "b1-h20-s7000-d96-causal",
    "b2-h16-s5000-d128",
    "fp16-b1-h24-s6000-d64",
)
"""Shapes between and beside those that are tuned, of classes that have records.

The last twelve are newer than the rules of tiles under load that goes on, which saw races of the others.
"""

FILE = FALLBACK


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

    bench: Bench
    store: Store
    rules: dict[str, Rule] | None
    budget: Budget
    options: Options = field(default_factory=Options)

    def run(self, workloads: Sequence[Workload], until: float) -> bool:
        """Do what is not in the file yet; False if the clock came to `until` before all was."""
        device = self.bench.device
        ruled = Records(self.bench.layers, shipped_rules if self.rules is None else lambda _: self.rules or {})
        unruled = Records(self.bench.layers, lambda _: {})
        for workload in self.bench.left(workloads):
            if self.bench.clock() + (self.budget.seconds or 0.0) + AFTER_S > until:
                return False
            ways = Ways.of(workload, device, ruled, unruled)
            winner = self._tuned(workload)
            self.bench.add(COLUMNS, self._raced(workload, ways, winner))
        return True

    def _tuned(self, workload: Workload) -> Config | None:
        """The winner of a search, or of the one that a stopped run has made; None where none works."""
        context = self.bench.context(self.store, budget=self.budget, options=self.options)
        record = tune_one(context, self.bench.executor, workload, ()).record
        return record.config if record is not None else None

    def _raced(self, workload: Workload, ways: Ways, winner: Config | None) -> list[dict[str, object]]:
        by_way = {RULE: ways.rule.config, NEAREST: ways.nearest.config, DEFAULT: ways.default}
        if winner is not None:
            by_way[TUNED] = winner
        outcomes = raced(self.bench.executor, self.bench.compiler, workload, by_way.values())
        found: list[dict[str, object]] = []
        for way, config in by_way.items():
            served = {RULE: ways.rule, NEAREST: ways.nearest}.get(way)
            why = {
                "rung": served.rung if served else "",
                "record": served.record.workload.key if served and served.record else "",
                "expected": _expected(served, workload),
            }
            found.append({**raced_row(workload, way, config, outcomes, outcomes), **why})
        return found


def _expected(served: Served | None, workload: Workload) -> str:
    """What `explain` would say that the rule's choice costs."""
    if served is None or served.rule is None or served.rung != NEAREST_HERE:
        return ""
    leaf = served.rule.leaf(answers(Sizes.of(workload)))
    expected = leaf.expected if leaf is not None and leaf.config == served.config else served.rule.nearest
    return f"{expected.mean:.4f}" if expected else ""


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
    with Bench.open(parser, options, FILE) as bench, Store.open(options.out / "fallback.sqlite3") as store:
        checks = Checks(bench=bench, store=store, rules=rules, budget=budget)
        try:
            done = checks.run(workloads, until=began + options.limit_seconds)
        except ValueError as error:
            parser.error(str(error))
    print(page(read(bench.path)))
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


if __name__ == "__main__":
    sys.exit(main())
