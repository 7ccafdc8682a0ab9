"""What a report is about: the records, runs and searches of one database file, or of all that serve."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.history import UNKNOWN, Origin
from flashgen.core.quoting import printable, shown
from flashgen.core.record import Failure, Measurement, Trial, TuningRecord
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.past import origins_of
from flashgen.db.reader import Reader
from flashgen.db.store import Store
from flashgen.db.trials import search_logs, without_copies
from flashgen.measure.scores import compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record, who made it, and the database that has it."""

    record: TuningRecord
    origin: Origin
    database: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search with at least one trial, those in the order in which they were asked for.

    `measured` has the trials that have times, each with what it took over the best of them. Times compare beside the
    reference kernel of the same race, where all trials have that.
    """

    log: SearchLog
    measured: tuple[tuple[Trial, float], ...] = field(init=False)

    def __post_init__(self) -> None:
        outcomes = {number: trial.outcome for number, trial in enumerate(self.trials)}
        found = compared({number: each for number, each in outcomes.items() if isinstance(each, Measurement)})
        ratios = [measured.reference_ratio for measured in found.values()]
        unknown = None in ratios
        times = [
            measured.median_ms if ratio is None or unknown else ratio
            for measured, ratio in zip(found.values(), ratios, strict=True)
        ]
        best = min(times, default=1.0)
        measured = tuple((self.trials[number], time / best) for number, time in zip(found, times, strict=True))
        object.__setattr__(self, "measured", measured)

    @property
    def workload(self) -> Workload:
        """What was searched for."""
        return self.log.trials[0].workload

    @property
    def device(self) -> Device:
        """Where."""
        return self.log.trials[0].device

    @property
    def run(self) -> str:
        """The id of the run, empty of trials from before schema 0009."""
        return self.log.trials[0].run

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials."""
        return self.log.trials

    @property
    def failed(self) -> tuple[tuple[Trial, Failure], ...]:
        """Those that have none, with the reason."""
        return tuple((trial, trial.outcome) for trial in self.trials if isinstance(trial.outcome, Failure))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a report shows; `databases` are the names of the files it was read from."""

    databases: tuple[str, ...]
    entries: tuple[Entry, ...] = ()
    searches: tuple[Search, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """Each device identity once, in order."""
        named = [*(entry.record.device for entry in self.entries), *(search.device for search in self.searches)]
        return tuple(dict(sorted({device.identity: device for device in named}.items())).values())

    def of(self, *, device: Device | None = None, run: str | None = None) -> Contents:
        """The part that belongs to a device identity and to a run.

        Raises:
            DatabaseError: no record and no trial does.
        """
        entries = [each for each in self.entries if device is None or each.record.device.identity == device.identity]
        searches = [each for each in self.searches if device is None or each.device.identity == device.identity]
        if run is not None:
            entries = [each for each in entries if each.origin.run == run]
            searches = [each for each in searches if each.run == run]
        if not entries and not searches:
            asked = [device.name if device else "", f"the run {run}" if run else ""]
            wanted = " and ".join(filter(None, asked)) or ", ".join(self.databases)
            raise DatabaseError(f"a report needs records or trials, and there is none of {shown(wanted)}")
        return Contents(databases=self.databases, entries=tuple(entries), searches=tuple(searches))


def read(paths: Sequence[Path]) -> Contents:
    """Read these files, or without any all databases that serve; a row that breaks a rule costs itself.

    What several files have is there once: of a record the first file's, of a search what `without_copies` keeps.

    Raises:
        DatabaseError: a file that was named cannot be read, or is not signed where a policy asks for it.
    """
    entries: dict[tuple[str, ...], Entry] = {}
    logs: list[tuple[SearchLog, str]] = []
    names: list[str] = []
    with _readers(paths) as readers:
        for name, reader in readers:
            try:
                found, tried = _entries(name, reader), _logs(reader)
            except FlashgenError as error:
                if paths:
                    raise
                # as at opening: of the databases that serve, none is able to stop the others
                warnings.warn(printable(f"tuning database {name} is not used: {error}", lines=True), stacklevel=2)
                continue
            names.append(name)
            for entry in found:
                entries.setdefault(entry.record.identity, entry)
            logs += [(log, name) for log in tried]
    ordered = [entries[identity] for identity in sorted(entries)]
    searches = [Search(log=log) for log, _ in without_copies(logs)]
    return Contents(databases=tuple(names), entries=tuple(ordered), searches=tuple(searches))


@contextlib.contextmanager
def _readers(paths: Sequence[Path]) -> Iterator[Iterable[tuple[str, Reader]]]:
    if paths:
        yield [(str(path), Reader.open(path, foreign=True)) for path in paths]
        return
    with Layers.open() as layers:
        yield [(layer.name, layer.reader) for layer in layers.layers]


def _entries(name: str, reader: Reader) -> Sequence[Entry]:
    origins = origins_of(reader)
    return [
        Entry(record=record, origin=origins.get(record.identity, UNKNOWN), database=name) for record in reader.records()
    ]


def _logs(reader: Reader) -> list[SearchLog]:
    with Store(reader) as store:
        if not store.counts()["trials"]:
            return []
        return [log for log in search_logs(store, store.workloads(), store.devices()) if log.trials]
