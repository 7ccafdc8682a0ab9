"""`flashgen db verify`, `diff` and `merge`: whole files, checked, compared, and put together.

Where there is a GPU, `merge` races the two configs of a workload before one wins, and `verify --retime` measures
records again. Nothing is written but the new file of a merge.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import output
from flashgen.cli.arguments import CommandLineError, Json
from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import plural
from flashgen.core.record import Failure, TuningRecord

if TYPE_CHECKING:
    from flashgen.db.comparison import Pair
    from flashgen.db.merging import Side
    from flashgen.db.past import Whole
    from flashgen.measure.protocol import Executor
    from flashgen.tuning.retime import Check

BROKEN = 1
"""Exit code of a verification that found something."""

NAMES = {"first": "A", "second": "B"}
"""The two databases as the command line calls them."""

First = Annotated[Path, typer.Argument(help="A tuning database.", metavar="A")]
Second = Annotated[Path, typer.Argument(help="Another one.", metavar="B")]
Gpu = Annotated[int, typer.Option("--gpu", help="The index of the GPU to measure on.", min=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Audit:
    """What a file holds: why it cannot be read, or its records, what else there is how often, and what is wrong."""

    path: Path
    problem: str | None = None
    records: tuple[TuningRecord, ...] = ()
    replaced: int = 0
    trials: int = 0
    searches: int = 0
    finalists: int = 0
    bad_rows: tuple[str, ...] = ()
    foreign_tables: tuple[str, ...] = ()

    @property
    def stale(self) -> int:
        """How many records are of kernels that the templates give no more."""
        from flashgen.tuning.history import is_current

        return sum(not is_current(record) for record in self.records)

    @property
    def changed(self) -> Counter[str]:
        """What is another one here than when records were measured: reasons, and of how many records each is one."""
        from flashgen.core.staleness import why_stale
        from flashgen.launch.nvml import limits, versions

        now = versions(), limits() if _has_gpu() else None
        return Counter(reason for record in self.records for reason in why_stale(record, *now))


def verify(
    paths: Annotated[list[Path] | None, typer.Argument(help="Files. Default: all databases that serve.")] = None,
    retime: Annotated[bool, typer.Option("--retime", help="Measure records of this GPU again.")] = False,
    top: Annotated[
        int | None, typer.Option("--top", help="Only the K records that claim the most.", metavar="K", min=1)
    ] = None,
    gpu: Gpu = 0,
    json: Json = False,
) -> None:
    """Read every page and every row of databases; with --retime, measure what their records promise.

    The exit code is 1 if a file is damaged, a row breaks a rule, or a kernel fails or is 10% slower than its record.
    """
    if top is not None and not retime:
        raise CommandLineError("--top says which records --retime measures; without --retime all are read")
    audits = [_audit(source) for source in _files(paths)]
    records = [record for audit in audits for record in audit.records]
    done = _retimed(records, top, gpu, quiet=json) if retime else []
    if json:
        output.print_json(
            {"files": [_audit_json(audit) for audit in audits], "retimed": [_check_json(check) for check in done]}
        )
    else:
        for audit in audits:
            _print_audit(audit)
    broken = [check for check in done if not check.is_kept]
    if broken or any(audit.problem or audit.bad_rows for audit in audits):
        raise typer.Exit(BROKEN)


def diff(first: First, second: Second, json: Json = False) -> None:
    """Compare two databases: what each of them knows, and which of two records is faster where that is known."""
    from flashgen.db.comparison import compare
    from flashgen.tuning.history import is_current

    pairs = [pair for pair in compare(_known(first), _known(second), is_current) if pair.verdict != "same"]
    _print_pairs(pairs, as_json=json)


def merge(
    first: First,
    second: Second,
    target: Annotated[Path, typer.Option("--output", "-o", help="The new file; its name ends in .sqlite3.")],
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Race the configs of both sides on the GPU of this machine.")
    ] = True,
    gpu: Gpu = 0,
    json: Json = False,
) -> None:
    """Write the records of two databases to a new one, of each workload the faster record.

    With a GPU both configs of a workload are timed against each other before one wins. Without one only records of the
    same versions and baselines compare; of the others, which are listed as undecided, the record of A is taken. The
    history of the new file has those of both and every record that was not taken.
    """
    from flashgen.db.comparison import POLICY, compare
    from flashgen.db.exchange import check_target, export_records
    from flashgen.db.files import present
    from flashgen.db.merging import merged
    from flashgen.tuning.history import is_current
    from flashgen.tuning.retime import decided
    from flashgen.tuning.tune import new_run

    if present(target):
        raise DatabaseError(f"a merge writes a new file and overwrites none; {target} exists")
    check_target(target)  # before anything is raced
    sides = _side(first), _side(second)
    stored = compare(sides[0].known, sides[1].known, is_current)
    pairs, host = list(stored), ""
    with _executor(gpu) if measure and _has_gpu() else contextlib.nullcontext() as executor:
        if executor is not None:
            host = executor.describe().hostname
            pairs = [decided(executor, pair) for pair in pairs]
    whole = merged(*sides, list(zip(stored, pairs, strict=True)), run=new_run(), host=host)
    count = export_records(whole.records, target, origins=whole.origins, replaced=whole.replaced, may_replace=False)
    shown = [pair for pair in pairs if pair.first is not None and pair.second is not None and pair.verdict != "same"]
    _print_pairs(shown, as_json=json, compared=pairs)
    if any(pair.verdict == "undecided" for pair in pairs):
        output.note(POLICY)
    output.note(f"{plural(count, 'record')} written to {target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A file to verify, and how look-ups open it (`flashgen.db.layers.Layers.open`)."""

    path: Path
    shipped: bool = False
    foreign: bool = False


def _files(paths: Sequence[Path] | None) -> Iterator[_Source]:
    from flashgen.core.settings import settings
    from flashgen.db import packages
    from flashgen.db.layers import is_absent, shipped_databases

    if paths:
        yield from (_Source(path=path) for path in paths)
        return
    user = settings().db_layers
    yield from (_Source(path=path, foreign=path != user[0]) for path in user if not is_absent(path))
    yield from (_Source(path=path, shipped=True, foreign=True) for path in packages.installed().values())
    yield from (_Source(path=path, shipped=True) for path in shipped_databases().values())


def _audit(source: _Source) -> _Audit:
    from flashgen.db.auditing import foreign_tables, orphans
    from flashgen.db.past import audited
    from flashgen.db.reader import Reader
    from flashgen.db.store import Store

    try:
        with Store(Reader.open(source.path, shipped=source.shipped, foreign=source.foreign)) as store:
            store.check()
            good, bad = store.reader.audited()
            replaced, bad_past = audited(store.reader)
            counts, worse = store.audited()
            known_bad = [*bad, *bad_past, *worse]
            named = {row[:2] for row in known_bad}
            known_bad += [row for row in orphans(store.reader) if row[:2] not in named]
            foreign = foreign_tables(store.reader)
    except DatabaseError as error:
        return _Audit(path=source.path, problem=str(error))
    rows = tuple(f"{table} {row}: {reason[:300]}" for table, row, reason in known_bad)
    return _Audit(
        path=source.path,
        bad_rows=rows,
        foreign_tables=tuple(foreign),
        records=tuple(good),
        replaced=replaced,
        trials=counts["trials"],
        searches=counts["searches"],
        finalists=counts["finalists"],
    )


def _print_audit(audit: _Audit) -> None:
    if audit.problem is not None:
        output.say(f"{audit.path}: {audit.problem}")
        return
    output.say(
        f"{audit.path}: whole, {len(audit.records)} records ({audit.stale} of kernels that have changed), "
        f"{audit.replaced} replaced ones, {audit.trials} tried configs, {len(audit.bad_rows)} bad rows"
    )
    for reason, count in audit.changed.most_common():
        output.say(f"  {count} not current: {reason} (they serve; flashgen tune --reverify)")
    if audit.foreign_tables:
        output.say(f"  tables of another program, which no look-up reads: {', '.join(audit.foreign_tables)}")
    for row in audit.bad_rows:
        output.say(f"  {row}")


def _audit_json(audit: _Audit) -> dict[str, object]:
    return {
        "path": str(audit.path),
        "problem": audit.problem,
        "records": len(audit.records),
        "stale": audit.stale,
        "not_current": dict(audit.changed),
        "replaced": audit.replaced,
        "trials": audit.trials,
        "searches": audit.searches,
        "finalists": audit.finalists,
        "bad_rows": list(audit.bad_rows),
        "foreign_tables": list(audit.foreign_tables),
    }


def _retimed(records: Sequence[TuningRecord], top: int | None, gpu: int, *, quiet: bool) -> list[Check]:
    from flashgen.tuning.history import is_current
    from flashgen.tuning.retime import boldest, checks

    with _executor(gpu) as executor:
        device = executor.describe().device
        here = [record for record in records if device.may_use(record.device) and is_current(record)]
        wanted = boldest(here, top)
        if not quiet:
            output.note(f"{len(wanted)} of {len(records)} records are of {device.identity}, current and measured again")
        return checks(executor, wanted, (lambda check: None) if quiet else _print_check)


def _print_check(check: Check) -> None:
    key = check.record.workload.key
    if isinstance(check.now, Failure):
        output.say(f"FAILED  {key}: {check.now}")
        return
    slower = check.slower or 0.0
    word = "kept  " if check.is_kept else "BROKEN"
    was, now = output.text(check.record.time_ms), output.text(check.now.time_ms)
    output.say(f"{word}  {key}: {was} ms then, {now} ms now, {slower:+.1%} beside the same reference")


def _check_json(check: Check) -> dict[str, object]:
    failed = isinstance(check.now, Failure)
    return {
        "workload": check.record.workload.key,
        "device_identity": check.record.device.identity,
        "then_ms": check.record.time_ms,
        "now_ms": None if isinstance(check.now, Failure) else check.now.time_ms,
        "slower": check.slower,
        "kept": check.is_kept,
        "failure": str(check.now) if failed else None,
    }


def _known(path: Path) -> Whole:
    """The records of a file and who made them, or an error: what is compared must be whole."""
    from flashgen.db.past import Whole, origins_of
    from flashgen.db.store import Store

    with Store.open(path, read_only=True) as store:
        store.check()
        return Whole(records=tuple(store.all_records()), origins=origins_of(store.reader))


def _side(path: Path) -> Side:
    from flashgen.core.settings import settings
    from flashgen.db.merging import Side
    from flashgen.db.past import whole
    from flashgen.db.reader import Reader
    from flashgen.db.store import Store

    own = settings().db_layers[0]  # which is written to, and so not signed
    with Store(Reader.open(path, foreign=path.absolute() != own.absolute())) as store:
        store.check()
        return Side(path=path, known=whole(store.reader))


def _print_pairs(pairs: Sequence[Pair], *, as_json: bool, compared: Sequence[Pair] | None = None) -> None:
    """Pairs that are listed, and how many of all that were compared, where those are more, ended how."""
    if as_json:
        output.print_json([_pair_json(pair) for pair in pairs])
        return
    if pairs:
        columns = ("workload", "device", "provenance", "A ms", "B ms", "verdict", "why")
        output.print_table(columns, [_pair_row(pair) for pair in pairs])
    counts = Counter(NAMES.get(pair.verdict, pair.verdict) for pair in (pairs if compared is None else compared))
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    output.say(said or "no difference")


def _pair_row(pair: Pair) -> tuple[output.Cell, ...]:
    times = [record.time_ms if record else None for record in (pair.first, pair.second)]
    record, verdict = pair.either, NAMES.get(pair.verdict, pair.verdict)
    return (record.workload.key, record.device.identity, record.provenance, *times, verdict, pair.reason)


def _pair_json(pair: Pair) -> dict[str, object]:
    def side(record: TuningRecord | None) -> dict[str, object] | None:
        if record is None:
            return None
        knobs = dict(record.config.knobs)
        return {"family": record.config.family, "knobs": knobs, "time_ms": record.time_ms, "hard_ms": record.hard_ms}

    return {
        "workload": pair.either.workload.key,
        "device_identity": pair.either.device.identity,
        "provenance": pair.either.provenance,
        "first": side(pair.first),
        "second": side(pair.second),
        "verdict": pair.verdict,
        "reason": pair.reason,
    }


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def _executor(gpu: int) -> Iterator[Executor]:
    from flashgen.tuning.runs import make_executor

    with contextlib.closing(make_executor(gpu)) as executor:
        yield executor
