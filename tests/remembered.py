"""What searches compute again and again from the same values, computed once in a process of the tests.

A test of a search enumerates the space of a workload, fits it to the sizes, asks the analytic model about all of it,
makes a lattice of it, and reads the tables that ship, as the tests before it did: half of their time. Each is a
function of values alone, and remembered where the modules of tuning call it. Tests of these functions call the
originals, from the modules that define them; candidates that are fitted, which are frozen, are those of the first test
that asked.

The statements that make the tables of a new database, which SQLAlchemy writes from the schema, are run as they were for
the first one of a process. The command line, which a test of a command in this process reads from its functions, is
made once, too: that took ten times as long as most commands. What packages say of databases, which is asked whenever
one is opened, is read once from each folder that there is by then.

And no file of this process waits until the disk has it: no test cuts the power, and those that kill a writer have
processes of their own, whose files do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parents[1] / "tuning_db"

SPACES = 48
"""Spaces that are kept: one has some thousand configs, which are some megabytes."""

MODELLED = 96

FITTED = 24
"""Spaces as they are at the sizes of a workload."""


def remember() -> None:
    """Remember from now on, in the modules that are loaded."""
    for name, modules, wrapped in (
        ("search_space", ("lattice",), _search_space),
        ("predict_all", ("candidates", "cost_inputs"), _predict_all),
        ("read_log", ("known_searches",), _read_log),
        ("Lattice", ("sampler",), _lattice),
    ):
        for module in filter(None, (sys.modules.get(f"flashgen.tuning.{each}") for each in modules)):
            setattr(module, name, wrapped(getattr(module, name)))
    candidates = sys.modules.get("flashgen.tuning.candidates")
    if candidates is not None:
        candidates.Candidates.of = _candidates_of(candidates.Candidates.of)
    learned_cost = sys.modules.get("flashgen.tuning.learned_cost")
    if learned_cost is not None:
        learned_cost.Lesson.of = _lesson(learned_cost.Lesson.of)
    files = sys.modules.get("flashgen.db.files")
    if files is not None:
        files._create = _create(files._create)  # type: ignore[attr-defined]
    packages = sys.modules.get("flashgen.db.packages")
    if packages is not None:
        packages._entry_points = _entry_points(packages._entry_points)  # type: ignore[attr-defined]
    connection = sys.modules.get("flashgen.db.connection")
    if connection is not None:
        kept = [pragma for pragma in connection.PRAGMAS if not pragma.startswith("synchronous")]
        connection.PRAGMAS = (*kept, "synchronous = OFF")  # type: ignore[attr-defined]
    testing = sys.modules.get("typer.testing")
    if testing is not None:
        testing._get_command = functools.cache(testing._get_command)  # type: ignore[attr-defined]


def _create(original: Any) -> Any:
    made: list[str] = []

    def create(bound: Any) -> None:
        if made:
            for statement in made:
                bound.exec_driver_sql(statement)
            return
        original(bound)
        tables = bound.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        made.extend(sql for (sql,) in tables)
        application, version = bound.exec_driver_sql(
            "SELECT application_id, version_num FROM pragma_application_id, alembic_version"
        ).one()
        made.extend([f"PRAGMA application_id = {application}", f"INSERT INTO alembic_version VALUES ('{version}')"])

    return create


def _entry_points(original: Any) -> Any:
    installed = frozenset(sys.path)
    read = functools.cache(lambda folder: tuple(original(folder)))
    return lambda folder: read(folder) if folder in installed else original(folder)


def _search_space(original: Any) -> Any:
    return functools.lru_cache(maxsize=SPACES)(original)


def _predict_all(original: Any) -> Any:
    from flashgen.codegen import families

    # the model of a config is that of its family's row, and a test may have other rows
    @functools.lru_cache(maxsize=MODELLED)
    def predicted(workload: Any, configs: tuple[Any, ...], device: Any, rows: tuple[Any, ...]) -> Any:
        return original(workload, configs, device)

    def copied(workload: Any, configs: Sequence[Any], device: Any) -> Any:
        return dict(predicted(workload, tuple(configs), device, families.FAMILIES))

    return copied


def _candidates_of(original: Any) -> Any:
    from flashgen.codegen import families as table

    @functools.lru_cache(maxsize=FITTED)
    def found(workload: Any, device: Any, families: tuple[str, ...], rows: tuple[Any, ...]) -> Any:
        return original(workload, device, families)

    def of(workload: Any, device: Any, families: tuple[str, ...] = ()) -> Any:
        return found(workload, device, families, (*table.FAMILIES, *table.DECODE_FAMILIES))

    return of


def _lattice(original: Any) -> Any:
    made: dict[int, tuple[Any, Any]] = {}

    def of(space: Any) -> Any:
        # by the set itself, which is that of `search_space` or of candidates that were fitted before
        known, lattice = made.get(id(space.configs), (None, None))
        if known is None or known.configs is not space.configs or known.knobs != space.knobs:
            lattice = original(space)
            made[id(space.configs)] = space, lattice
            while len(made) > SPACES:
                del made[next(iter(made))]
        return lattice

    return of


LOGS: dict[Path, Any] = {}
LESSONS: dict[int, Any] = {}


def _read_log(original: Any) -> Any:
    def read(path: Path) -> Any:
        if not path.is_relative_to(TABLES):
            return original(path)
        if path not in LOGS:
            LOGS[path] = original(path)
        return LOGS[path]

    return read


def _lesson(original: Any) -> Any:
    def of(log: Any) -> Any:
        if not any(log is known for known in LOGS.values()):
            return original(log)
        if id(log) not in LESSONS:  # it lives as long as LOGS
            LESSONS[id(log)] = original(log)
        return LESSONS[id(log)]

    return of
