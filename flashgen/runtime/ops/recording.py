"""Recorders that count what a process calls: they wrap what the memos hold, so that without one nothing is slower.

A recorder begins with empty memos. The slow path asks this module, once for each entry that it fills, to put a counter
around what serves, and the memos are emptied again when the recorder ends. The path of a repeated call does not know.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import printable
from flashgen.core.settings import settings

if TYPE_CHECKING:
    from flashgen.core.calls import CallRecord
    from flashgen.core.device import Device
    from flashgen.core.workload import Workload
    from flashgen.runtime.lookup.ladder import Served

WRITE_EVERY_S = 30.0
"""How old counts get before a call writes them, so that a process that is killed loses no more."""


class Counting(Protocol):
    """What counts calls."""

    counts_reference: bool
    """Whether calls of `flashgen.reference` are counted, too: as such that no kernel serves."""

    def cell(self, record: CallRecord) -> Any:
        """What `count` is told of calls like this one."""

    def count(self, cell: Any) -> None:
        """Count one call."""


RECORDERS: list[Counting] = []
"""Those at work."""


class Recorder:
    """Counts calls, and adds the counts to a file from time to time and at the end."""

    counts_reference = False

    def __init__(self, path: Path) -> None:
        """Refuse a file that cannot be added to, while nothing is lost yet.

        Raises:
            WorkloadError: there is something else, or no file can be written there.
        """
        self._path = path
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._cells: dict[CallRecord, list[int]] = {}
        self._written = time.monotonic()
        _add(path, ())
        _ALIVE.add(self)
        register_after_fork(self, Recorder.write_at_end)

    def cell(self, record: CallRecord) -> list[int]:
        """Where calls like this one are counted, so that counting one looks nothing up."""
        with self._lock:
            return self._cells.setdefault(record, [0])

    def count(self, cell: list[int]) -> None:
        """Count one call; writes where that was long ago."""
        with self._lock:
            cell[0] += 1
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.write_or_warn()

    def write(self) -> None:
        """Add what was counted since the last time to the file; what cannot be written is kept for the next time.

        Raises:
            WorkloadError: what is there by now is no file of calls, or it cannot be written any more.
        """
        with self._writing:
            with self._lock:
                counts = {record: cell[0] for record, cell in self._cells.items() if cell[0]}
                self._move(counts, -1)
                self._written = time.monotonic()
            if not counts:
                return
            try:
                _add(self._path, [replace(record, calls=count) for record, count in counts.items()])
            except BaseException:
                with self._lock:
                    self._move(counts, 1)
                raise

    def write_or_warn(self) -> None:
        """The same in the midst of a program, which a full disk must not stop."""
        try:
            self.write()
        except WorkloadError as error:
            warnings.warn(printable(f"calls could not be written: {error}"), stacklevel=2)

    def write_at_end(self) -> None:
        """Write when this process ends; one of `multiprocessing` may end without a word to `atexit`."""
        atexit.register(self.write_or_warn)
        Finalize(None, self.write_or_warn, exitpriority=0)

    def forked(self) -> None:
        """A child process counts its own calls, not again those of its parent."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        for cell in self._cells.values():
            cell[0] = 0

    def _move(self, counts: dict[CallRecord, int], sign: int) -> None:
        for record, count in counts.items():
            self._cells[record][0] += sign * count


def _add(path: Path, records: Iterable[CallRecord]) -> None:
    """`add_calls`, whose every failure is a WorkloadError here."""
    from flashgen.core.calls import add_calls

    try:
        add_calls(path, records)
    except OSError as error:
        raise WorkloadError(f"calls are recorded in a file that can be written, got {path}: {error}") from error


_ALIVE: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _count_anew() -> None:
    for recorder in _ALIVE:
        recorder.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_anew)


def recorders() -> list[Counting]:
    """Those at work, with that of `FLASHGEN_RECORD`."""
    path = settings().record
    return RECORDERS if path is None else [*RECORDERS, _of_environment(path)]


@functools.cache
def _of_environment(path: Path) -> Recorder:
    recorder = Recorder(path)
    recorder.write_at_end()
    return recorder


def counted(run: Any, workload: Workload, device: Device, served: Served, impl: str | None = None) -> Any:
    """What serves a key of the memo, counted where calls are recorded; else just that."""
    active = recorders()
    if not active:
        return run
    return _counting(run, call_record(workload, device, served, impl), tuple(active))


def counted_launches(launches: Any, workload_of: Callable[[Any], Workload], device: Device, served: Served) -> Any:
    """The same of decode launches, which are made for shapes that are known later."""
    if not recorders():
        return launches

    def sized(shape: Any) -> Any:
        launch = launches(shape)
        return launch._replace(run=counted(launch.run, workload_of(shape), device, served))

    return sized


def refused(workload: Callable[[], Workload]) -> None:
    """Count a call that no kernel serves, which happens where an error says so each time."""
    _count_unserved(recorders(), workload)


def computed_by_reference(workload: Callable[[], Workload]) -> None:
    """Count a call of `flashgen.reference` where that is asked for."""
    _count_unserved([recorder for recorder in RECORDERS if recorder.counts_reference], workload)


def _count_unserved(active: list[Counting], workload: Callable[[], Workload]) -> None:
    if active:
        from flashgen.core.calls import CallRecord

        record = CallRecord(workload=workload(), device="", rung=0, server="", calls=1)
        for recorder in active:
            recorder.count(recorder.cell(record))


def call_record(workload: Workload, device: Device, served: Served, impl: str | None) -> CallRecord:
    """One call, and what it is taken to need: by the record that serves, scaled to its size, or by the data sheet."""
    from flashgen.core.calls import CallRecord, usual_ms

    usual, record = usual_ms(workload, device), served.record
    times = {} if record is None else {one.impl: one.median_ms for one in record.baselines}
    time_ms = None if record is None else record.time_ms if impl is None else times.get(impl)
    call_ms, source = usual or None, "rate" if usual else ""
    if record is not None and time_ms:
        is_exact = record.workload == workload and record.device.identity == device.identity
        scale = 1.0 if is_exact else usual / (usual_ms(record.workload, record.device) or 1.0)
        call_ms, source = time_ms * scale or None, "record" if is_exact else "nearest"
    return CallRecord(
        workload=workload,
        device=device.identity,
        rung=served.rung,
        server=impl or served.config.family,
        config=served.config if impl is None else None,
        calls=1,
        call_ms=call_ms,
        time_from=source if call_ms else "",
    )


def _counting(run: Any, record: CallRecord, active: tuple[Counting, ...]) -> Any:
    cells = [(recorder, recorder.cell(record)) for recorder in active]

    def counting(*given: Any) -> Any:
        found = run(*given)
        for recorder, cell in cells:
            recorder.count(cell)
        return found

    return counting
