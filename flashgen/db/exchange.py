"""Moving records between machines: export to one file, import all or nothing, and a CSV that people can review.

An export is an ordinary database of ours: it can be put among the shipped files, into FLASHGEN_DB, or imported. Its
rows are written in a fixed order, so that the same records give the same bytes.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from flashgen.codegen.families import validate as validate_config
from flashgen.core.errors import DatabaseError
from flashgen.core.folders import is_replaceable, scratch_beside
from flashgen.core.history import UNKNOWN, Origin, Replaced
from flashgen.core.record import Measurement, TuningRecord, moment
from flashgen.core.staleness import why_stale
from flashgen.db import files
from flashgen.db.past import Origins, Whole, all_replaced, origins_of
from flashgen.db.reader import Reader
from flashgen.db.reading import Validate
from flashgen.db.store import Store
from flashgen.db.writing import Incoming, Merged

NOISE = 0.02
"""Two medians of different rounds that are closer than this say nothing about which config is faster."""

EVEN_SHARE = 0.1
"""What a time that does not depend on the data may cost on normal data: 7% is the most that was measured for it."""

SCRATCH_PREFIX = ".flashgen-export-"
"""Of the folder of an unfinished export beside its target; the next export there deletes those of killed ones."""

JOURNALS = ("-wal", "-journal")
"""Ends of the names of files that SQLite reads as part of the database beside them, whoever has left them there."""

CLOCK_TOLERANCE = timedelta(days=1)
"""How far the clocks of two machines may be apart."""

WAL_AT, WAL = 18, 2
"""The byte of an SQLite file that says how it is written, and what is there in a file that `Store.open` writes to."""

CSV_COLUMNS = (
    *("workload", "device", "arch", "num_sms", "memory_gb", "provenance", "family", "knobs"),
    *(
        "median_ms",
        "hard_ms",
        "profile_ms",
        "tflops",
        "spread",
        "windows",
        "reference_ms",
        "sm_clock_mhz",
        "max_error",
        "mean_error",
        "confidence",
    ),
    *("predicted_ms", "anchors", "source_digest", "flashgen", "triton", "torch", "driver", "power_limit_w"),
    *("max_sm_clock_mhz", "created"),
)


def export_records(
    records: Iterable[TuningRecord],
    path: Path | str,
    *,
    origins: Origins | None = None,
    replaced: Iterable[Replaced] = (),
    may_replace: bool = True,
) -> int:
    """Write `records` to one new SQLite file at `path` and to a CSV of the same name beside it.

    They take the place of an export of before, and of no other file; if one cannot, nothing is written.

    Args:
        records: what it holds.
        path: the file.
        origins: who made them; nobody is named without.
        replaced: what they took the place of, the first one first.
        may_replace: whether an export of before is replaced.

    Returns:
        How many records were written.

    Raises:
        DatabaseError: the file cannot be written, or `check_target` refuses it.
    """
    path, past = Path(path), tuple(replaced)
    check_target(path, past)
    ordered = sorted(records, key=lambda record: record.identity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_beside(path, SCRATCH_PREFIX) as scratch:
            draft, packed, table = (scratch / name for name in ("draft.sqlite3", "packed.sqlite3", "table.csv"))
            # messages name the place of the export, and not the draft
            with Store(Reader(path, files.prepare(draft, "write", path), "write", validate_config)) as store:
                store.put_records(ordered, Incoming(origins=origins or {}))
                store.put_replaced(past)
            files.pack(draft, packed, path)
            to_csv(ordered, table)
            if may_replace:
                packed.replace(path)
            else:
                _place(packed, path)
            table.replace(path.with_suffix(".csv"))
    except OSError as error:
        raise DatabaseError(f"an export needs a place that can be written, got {path}: {error}") from error
    return len(ordered)


def _place(made: Path, path: Path) -> None:
    """Give a file its name, where nothing has it, whenever that came.

    Raises:
        DatabaseError: something has.
    """
    try:
        os.link(made, path)
    except OSError as error:  # or no file system of links
        if os.path.lexists(path):
            raise DatabaseError(f"a new file overwrites none; {path} exists") from error
        made.replace(path)


def check_target(path: Path, replaced: Iterable[Replaced] = ()) -> None:
    """Refuse a place where an export would cost what somebody else keeps there, or would be spoiled by it.

    Args:
        path: the file.
        replaced: the history that the export has.

    Raises:
        DatabaseError: the name does not end in `.sqlite3`, the file is no export or has a history that this one has
            not, the CSV beside it is that of others, SQLite would take the journal of another database for that of the
            export, or the folder cannot be written.
    """
    exists = files.present(path)
    if path.suffix != ".sqlite3" or (exists and not path.is_file()):
        raise DatabaseError(f"an export is a file whose name ends in .sqlite3, got {path}")
    for end in JOURNALS:  # of a database that somebody has open, or was killed with
        if files.present(path.with_name(path.name + end)):
            raise DatabaseError(f"an export needs a place where no other database is in use, got {path}{end}")
    table = path.with_suffix(".csv")
    try:
        if exists and path.stat().st_size:
            _check_export(path, replaced)
        if not is_replaceable(table, CSV_HEAD):
            raise DatabaseError(f"an export takes the place of the CSV of an export alone, which {table} is not")
    except OSError as error:
        raise DatabaseError(f"an export needs a place that can be read, got {path}: {error}") from error
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DatabaseError(f"an export needs a place that can be written, got {path}: {folder} cannot be")


def _check_export(path: Path, replaced: Iterable[Replaced]) -> None:
    """Refuse a file that is no export, or has a history that would be gone.

    An export is a file without a WAL, in which nothing was tuned: whoever opens a database to write to it, changes it
    to a WAL for good. Where a file system has none, the trials and the history tell.
    """
    with Store.open(path, read_only=True) as store:
        counts = store.counts()
        there = all_replaced(store.reader)
    if counts["trials"] + counts["searches"] + counts["finalists"]:
        raise DatabaseError(
            f"an export takes the place of an export alone; {path} has {counts['trials']} tried configs"
        )
    with path.open("rb") as file:
        header = file.read(WAL_AT + 1)
    if header[WAL_AT] == WAL:
        raise DatabaseError(f"an export takes the place of an export alone; {path} is a database that was written to")
    given = set(replaced)
    lost = counts["history"] - sum(each in given for each in there)
    if lost:
        raise DatabaseError(
            f"an export forgets no history (--history); {path} has {lost} replaced records that this lacks"
        )


CSV_HEAD = ",".join(CSV_COLUMNS[:8]).encode() + b","
"""What the CSV of every export begins with; the columns behind these differ from release to release."""

IsCurrent = Callable[[TuningRecord], bool]
"""Whether the kernel of a record is still what the templates give: else its time is that of another kernel."""


def import_records(store: Store, path: Path | str, is_current: IsCurrent | None = None) -> Merged:
    """Take over the records of another file into `store`, in one transaction: all of them are valid, or none is taken.

    Where both files have a record for the same workload, device identity and provenance, one that is current takes the
    place of one that is not, if `is_current` tells; else `better` decides. What is replaced goes to the history of
    `store`. Trials, and the history of the other file, stay where they were made; who made a record comes with it.

    Raises:
        DatabaseError: the file is not one of ours or damaged, not signed where a policy asks for it, or a row of it
            breaks a rule; nothing was changed.
    """
    theirs = importable(path, store.validate)

    def wins(their: TuningRecord, our: TuningRecord, our_origin: Origin) -> bool:
        if is_current is not None and (current := is_current(their)) != is_current(our):
            return current
        return better(their, our, theirs.origin(their.identity), our_origin)

    incoming = Incoming(reason="import", source=Path(path).name, origins=theirs.origins)
    return store.merge_records(theirs.records, wins, incoming)


def importable(path: Path | str, validate: Validate = validate_config) -> Whole:
    """The records of a file that may be imported, and who made them; nothing of its history.

    Raises:
        DatabaseError: as `import_records`.
    """
    with Store(Reader.open(Path(path), foreign=True, validate=validate)) as other:
        other.check()
        theirs = Whole(records=tuple(other.all_records()), origins=origins_of(other.reader, strict=True))
    for record in theirs.records:
        if _is_of_the_future(record):
            raise DatabaseError(f"a record is imported after it was made; {path} has one of {record.created}")
    return theirs


def better(
    theirs: TuningRecord, ours: TuningRecord, their_origin: Origin = UNKNOWN, our_origin: Origin = UNKNOWN
) -> bool:
    """Whether an imported record replaces ours of the same workload, device identity and provenance.

    1. Measured, both or neither on hard data: the winner of a race that had both configs, which is known of the
       runners-up in an origin; where two races had both, that of the newer one. Records of two other races have met
       different moments of a card.
    2. Measured, one of them on normal data alone: the one that was measured on hard data too, unless it is slower on
       normal data by more than `EVEN_SHARE`, for the other may take twice as long on hard data.
    3. Measured: the faster one, by the geometric mean of both times where both have them, and by the ratio to the
       reference kernel of the same race where that was the same for both (absolute times of different races do not
       compare on a card that changes its clock), else by the medians, if the two differ by more than `NOISE`.
    4. Both predicted, by one version: what is predicted to be faster.
    5. Otherwise (as fast, or predicted by different versions): the newer one; one of the future was made at an unknown
       time.
    """
    if (won := raced(theirs, ours, their_origin, our_origin)) is not None:
        return won
    if theirs.measurement and ours.measurement:
        if (theirs.hard_ms is None) != (ours.hard_ms is None):
            gain = _gain(theirs, theirs.measurement, ours, ours.measurement)
            return gain > EVEN_SHARE if theirs.hard_ms is None else gain > -EVEN_SHARE
        gain = _gain(theirs, theirs.measurement.balanced, ours, ours.measurement.balanced)
        if abs(gain) > NOISE:
            return gain > 0
    times = theirs.predicted_ms or 0.0, ours.predicted_ms or 0.0
    are_predicted = not theirs.measurement and not ours.measurement and all(times)
    if are_predicted and theirs.versions.released == ours.versions.released and times[0] != times[1]:
        return times[0] < times[1]
    return _made(theirs) > _made(ours)


def raced(theirs: TuningRecord, ours: TuningRecord, their_origin: Origin, our_origin: Origin) -> bool | None:
    """Whether theirs is the faster one by a race that had both configs, the newer one of two.

    None if none had, or where one record alone was measured on hard data.
    """
    if theirs.measurement is None or ours.measurement is None or (theirs.hard_ms is None) != (ours.hard_ms is None):
        return None
    won, lost = _has_beaten(theirs.measurement, their_origin, ours), _has_beaten(ours.measurement, our_origin, theirs)
    if won and lost:
        return _made(theirs) > _made(ours)
    return won if won or lost else None


def _has_beaten(winner: Measurement, origin: Origin, other: TuningRecord) -> bool:
    """Whether the config of another record was a rival in the race of a record, and not the faster one by its times.

    A record stays where a rival is ahead by less than a race can be sure of.
    """
    times = [rival.over(winner) for rival in origin.runners_up if rival.config == other.config]
    return any(over is not None and over >= 1 for over in times)


def _made(record: TuningRecord) -> datetime:
    return moment("" if _is_of_the_future(record) else record.created)


def _is_of_the_future(record: TuningRecord) -> bool:
    return moment(record.created) > datetime.now(timezone.utc) + CLOCK_TOLERANCE


def _gain(theirs: TuningRecord, measured: Measurement, ours: TuningRecord, ours_measured: Measurement) -> float:
    """How much faster theirs is than ours.

    The reference is a backend of torch wherever one can run, and then a record names those that ran. Else it is the
    default config, which is another kernel in another version: a default that became twice as fast would make every
    config beside it look twice as slow. Nor does the ratio compare where torch or the driver is another one: beside an
    attention that became 20% faster, a faster record would look slower.
    """
    ran = {baseline.impl for baseline in theirs.baselines}
    ratio, our_ratio = measured.reference_ratio, ours_measured.reference_ratio
    same = not why_stale(theirs, replace(ours.versions, triton=""))
    if ratio and our_ratio and same and ran and ran == {baseline.impl for baseline in ours.baselines}:
        return our_ratio / ratio - 1
    return ours_measured.median_ms / measured.median_ms - 1


def to_csv(records: Sequence[TuningRecord], path: Path | str) -> None:
    """Write one readable line for each record, in the order given; the file is for people and is never read back."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        writer.writerows(_csv_row(record) for record in records)


def _csv_row(record: TuningRecord) -> list[str | int]:
    device, versions = record.device, record.versions
    return [
        *(record.workload.key, device.name, device.arch, device.num_sms, device.memory_gb),
        *(record.provenance, record.config.family, " ".join(f"{name}={value}" for name, value in record.config.knobs)),
        *_measured_columns(record),
        _number(record.predicted_ms),
        " ".join(f"{baseline.impl}={_number(baseline.median_ms)}" for baseline in record.baselines),
        *(record.source_digest, versions.flashgen, versions.triton, versions.torch, versions.driver),
        *(_number(record.limits.power_limit_w), _number(record.limits.max_sm_clock_mhz), record.created),
    ]


def _measured_columns(record: TuningRecord) -> list[str | int]:
    measured, tflops = record.measurement, _number(record.tflops)
    if measured is None:
        return ["", "", "", tflops, "", 0, "", "", "", "", ""]
    return [
        *(_number(measured.median_ms), _number(measured.hard_ms)),
        *(" ".join(f"{name}={_number(ms)}" for name, ms in measured.profile_ms.items()), tflops),
        *(_number(measured.spread), len(measured.times_ms)),
        *(_number(measured.reference_ms), _number(measured.sm_clock_mhz)),
        *(_number(measured.max_error), _number(measured.mean_error), _number(measured.confidence)),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
