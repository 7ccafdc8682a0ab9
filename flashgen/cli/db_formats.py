"""`flashgen db export --format`: trials in forms that other tools read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.cli import output
from flashgen.cli.arguments import CommandLineError
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError
from flashgen.core.names import meant
from flashgen.core.quoting import plural

if TYPE_CHECKING:
    from flashgen.core.search_log import SearchLog

SQLITE, T4, OPTUNA, TABLES = "sqlite", "t4", "optuna", "tables"
FORMATS = (SQLITE, T4, OPTUNA, TABLES)

MAX_RUN = 40
"""Characters of a run's id in the name of a file; flashgen's own have fewer."""


def check_format(name: str, others: Mapping[str, object]) -> None:
    """Refuse a format that there is not, and options of records beside one of trials.

    Raises:
        CommandLineError: it is not known, or such an option is given.
    """
    if name not in FORMATS:
        raise CommandLineError(f"--format is one of {', '.join(FORMATS)}, got {name!r}{meant(name, FORMATS)}")
    given = [option for option, value in others.items() if value]
    if name != SQLITE and given:
        raise CommandLineError(f"--format {name} writes trials, not records: no {', '.join(given)}")


def export_trials(name: str, target: str, *, device: Device | None, everything: bool, run: str | None) -> None:
    """Write the trials of the database that is written to, or of all, and say how many.

    Raises:
        DatabaseError: there is none, or they cannot be written.
    """
    from flashgen.db.layers import Layers

    with Layers.open() as layers:
        logs = [log for log, _ in layers.searches(device=device, run=run, first_only=not everything)]
    if run is not None and not any(log.trials for log in logs):
        raise DatabaseError(f"an export of a run needs its trials, and none of run {run!r} is stored here")
    _WRITERS[name](logs, target)


def _write_t4(logs: list[SearchLog], target: str) -> None:
    from flashgen.db.t4 import export_t4

    written = export_t4(logs, Path(target))
    output.say(f"{len(written)} search spaces written to {target}")


def _write_studies(logs: list[SearchLog], target: str) -> None:
    from flashgen.db.urls import parse_url, without_secrets
    from flashgen.tuning.studies import export_studies

    new, count = export_studies((trial for log in logs for trial in log.trials), target)
    where = without_secrets(parse_url(target)) if "://" in target else target
    output.say(f"{new} of {count} trials written to {where}; the others were there")


def _write_tables(logs: list[SearchLog], target: str) -> None:
    """A file for each search of which it is known how it was asked for, in a folder for each device.

    Raises:
        DatabaseError: there is none, or the folder cannot be written.
    """
    from flashgen.db.log_files import SUFFIX, write_log

    known = [(log, log.search) for log in logs if log.search is not None]
    without = len(logs) - len(known)
    left = f"; {without} searches are without their settings and left out" if without else ""
    if not known:
        raise DatabaseError(f"an export to tables needs searches with their settings, and none is stored here{left}")
    for log, search in known:
        run = re.sub(r"[^\w-]", "_", search.run)[:MAX_RUN]  # of a file from somebody else it may be anything
        if run != search.run:  # which others may become, too
            run = f"{run}-{hashlib.sha256(search.run.encode()).hexdigest()[:8]}"
        write_log(log, Path(target) / search.device.folder / f"{search.workload.key}-{run}{SUFFIX}")
    output.say(f"{plural(len(known), 'search', 'searches')} written to {target}{left}")


_WRITERS: dict[str, Callable[[list[SearchLog], str], None]] = {
    T4: _write_t4,
    OPTUNA: _write_studies,
    TABLES: _write_tables,
}
