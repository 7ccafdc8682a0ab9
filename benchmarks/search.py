"""What a search is worth: ours and others on replay tables, without a GPU.

python -m benchmarks.search [TABLE.jsonl.gz ...] [--seeds 5] [--only 'flashgen*'] [--jobs 2] [--out FOLDER]

The tables of `tuning_db/*/replays/` if none is named, of some devices alone with `--device`, its folder there;
`--synthetic` takes made-up ones, to try the bench itself. What is learned comes from the tables that ship, and with
`--learn-from FOLDER` from those of a folder, too. Prints
a table of how much longer the best config takes that a search has tried than the best of the table, after so many
trials and after so many seconds of the machine that measured it; writes `search.csv`, `search.md` and `search.png`.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import table_row
from benchmarks.replay_plan import MATRIX
from benchmarks.search_contestants import WITH_MODEL, Maker, contestants
from benchmarks.search_replay import JOBS, Step, Table, after_seconds, after_trials, replay
from benchmarks.search_synthetic import synthetic
from flashgen.core.device import find_device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.tuning.known_searches import shipped_tables
from flashgen.tuning.learned_cost import LearnedCost, is_installed

TRIALS = (5, 10, 25, 50, 100)
SECONDS = (5.0, 10.0, 20.0, 60.0)

TABLES = Path(__file__).resolve().parents[1] / "tuning_db"

SYNTHETIC = (
    ("b4-h16-s4096-d128", ("hopper_forward",)),
    ("b4-h16-s4096-d256-causal", ("hopper_forward",)),
    ("bwd-b4-h16-s4096-d128-causal", ("hopper_backward_fused", "hopper_backward_split")),
)
"""Spaces of made-up tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contestant on one table with one seed."""

    contestant: str
    table: str
    seed: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The ratio to the best of the table at one mark: the geometric mean of all tables, and the worst of them.

    Of a table it is the geometric mean over the seeds. None where a table's replays were over before.
    """

    mean: float
    worst: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        tables = _tables(options.tables or shipped(options.device), options.synthetic)
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))
    if not tables:
        parser.error("no table is named, and none ships; python -m benchmarks.replay_tables measures one")
    found, absent = _everybody(options.learn_from)
    patterns = options.only or ["*"]
    chosen = [name for name in found if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    for name, reason in absent.items():
        print(f"{name} does not take part: {reason}", file=sys.stderr)
    if options.jobs == 1:
        makers = {name: found[name] for name in chosen}
        runs = compare(tables, makers, seeds=range(options.seeds), trials=options.trials, say=_say)
    else:
        paths = options.tables or shipped(options.device)
        common = (paths, options.synthetic, options.seeds, options.trials, options.learn_from)
        asked = [(name, *common) for name in chosen]
        with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs = [run for own in pool.map(_alone, *zip(*asked, strict=True)) for run in own]
    text = page(runs, tables)
    print(text)
    if options.out:
        write(runs, text, options.out)
    return 0


def _tables(paths: Sequence[Path], with_synthetic: bool) -> list[Table]:
    tables = [Table.of(read_log(path)) for path in paths]
    if with_synthetic:
        device = find_device("h200")
        tables += [Table.of(synthetic(Workload.parse(key), device, families=names)) for key, names in SYNTHETIC]
    return tables


def _everybody(folders: Sequence[Path] = (), *, learn: bool = True) -> tuple[dict[str, Maker], dict[str, str]]:
    with Layers.open() as layers:
        records = [record for record, _ in layers.records(provenance="measured")]
    if not learn or not is_installed():
        return contestants(records)
    more = [read_log(path) for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return contestants(records, LearnedCost([*shipped_tables(), *more]))


def _alone(
    name: str, paths: Sequence[Path], with_synthetic: bool, seeds: int, trials: int, folders: Sequence[Path]
) -> list[Run]:
    """One contestant, in a process that knows nothing yet, and reads what is learned from for those that learn."""
    makers = {name: _everybody(folders, learn=name in WITH_MODEL)[0][name]}
    return compare(_tables(paths, with_synthetic), makers, seeds=range(seeds), trials=trials, say=_say)


def shipped(devices: Sequence[str] = ()) -> list[Path]:
    """The tables that ship, but for those of a matrix: a few configs are no space to search.

    Args:
        devices: folders of `tuning_db`; none named means all.
    """
    every = [path for name in devices or ("*",) for path in sorted(TABLES.glob(f"{name}/replays/*{SUFFIX}"))]
    return [path for path in every if not path.name.endswith(f"-{MATRIX}{SUFFIX}")]


def compare(
    tables: Sequence[Table],
    makers: dict[str, Maker],
    *,
    seeds: Iterable[int],
    trials: int = max(TRIALS),
    jobs: int = JOBS,
    say: Callable[[str], None] = lambda line: None,
) -> list[Run]:
    """Every contestant on every table with every seed; one that cannot take a table is left out of all."""
    runs: list[Run] = []
    wanted = tuple(seeds)
    for name, make in makers.items():
        try:
            own = [_run(name, make, table, seed, trials, jobs) for table in tables for seed in wanted]
        except ValueError as error:
            say(f"{name} does not take part: {error}")
            continue
        runs += own
        say(f"{name}: done")
    return runs


def _run(name: str, make: Maker, table: Table, seed: int, trials: int, jobs: int) -> Run:
    steps = replay(table, make(table, seed), trials=min(trials, len(table.answers)), jobs=jobs)
    return Run(contestant=name, table=table.name, seed=seed, steps=tuple(steps))


def score(runs: Iterable[Run], at: Callable[[Sequence[Step]], float | None]) -> Score | None:
    """The score of one contestant's runs, `at` telling the ratio at a mark."""
    tables: dict[str, list[float]] = {}
    for run in runs:
        ratio = at(run.steps)
        if ratio is None:
            return None
        tables.setdefault(run.table, []).append(ratio)
    means = [statistics.geometric_mean(ratios) for ratios in tables.values()]
    return Score(mean=statistics.geometric_mean(means), worst=max(means)) if means else None


def scores(runs: Sequence[Run]) -> dict[str, list[Score | None]]:
    """For each contestant its scores after `TRIALS`, then after `SECONDS`."""
    found: dict[str, list[Score | None]] = {}
    for name in dict.fromkeys(run.contestant for run in runs):
        own = [run for run in runs if run.contestant == name]
        found[name] = [score(own, lambda steps, n=count: after_trials(steps, n)) for count in TRIALS]  # type: ignore[misc]
        found[name] += [score(own, lambda steps, s=seconds: after_seconds(steps, s)) for seconds in SECONDS]  # type: ignore[misc]
    return found


def page(runs: Sequence[Run], tables: Sequence[Table]) -> str:
    """The table of a comparison, with what it was made on, in Markdown."""
    marks = [*(f"{count} trials" for count in TRIALS), *(f"{seconds:g} s" for seconds in SECONDS)]
    seeds = len({run.seed for run in runs})
    lines = [
        f"Time of the best config tried over that of the best one in the table, after so many trials or seconds: the "
        f"geometric mean over {len(tables)} tables and {seeds} seeds and, in brackets, the worst table.",
        "",
        table_row(["search", *marks]),
        table_row(["---"] * (1 + len(marks))),
        *(table_row([name, *map(_cell, found)]) for name, found in scores(runs).items()),
        "",
        table_row(["table", "device", "configs", "with a time", "median / best"]),
        table_row(["---"] * 5),
        *(table_row(_about(table)) for table in tables),
        "",
    ]
    return "\n".join(lines)


def write(runs: Sequence[Run], text: str, folder: Path) -> None:
    """The comparison as Markdown, every run's ratios as CSV, and a chart where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "search.md").write_text(text)
    with (folder / "search.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("search", "workload", "seed", "trial", "seconds", "ratio"))
        for run in runs:
            for number, step in enumerate(run.steps, 1):
                cells = (number, f"{step.seconds:.3f}", f"{step.ratio:.5f}")
                writer.writerow((run.contestant, run.table, run.seed, *cells))
    try:
        from benchmarks.search_chart import draw
    except ImportError:
        _say("no chart: pip install flashgen[report]")
        return
    draw(runs, folder / "search.png")


def _about(table: Table) -> list[str]:
    times = [answer.right_ms for answer in table.answers.values() if answer.right_ms]
    middle = statistics.median(times) / table.best_ms
    return [f"`{table.name}`", table.device.name, str(len(table.answers)), str(len(times)), f"{middle:.2f}"]


def _cell(found: Score | None) -> str:
    return "-" if found is None else f"{found.mean:.3f} ({found.worst:.3f})"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.search", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", type=Path, nargs="*", help="default: those of tuning_db/*/replays/")
    parser.add_argument("--synthetic", action="store_true", help="made-up tables as well")
    parser.add_argument("--seeds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=max(TRIALS), help="the most of each (default: %(default)s)")
    parser.add_argument("--device", action="append", default=[], metavar="FOLDER", help="tables of these; repeatable")
    parser.add_argument("--learn-from", action="append", type=Path, default=[], metavar="FOLDER", help="more tables")
    parser.add_argument("--only", action="append", metavar="NAME", help="contestants with such a name; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="contestants side by side (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for search.md, search.csv and search.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
