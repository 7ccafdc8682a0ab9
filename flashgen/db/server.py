"""`ServerStore`: the tables of a tuning database on a server that SQLAlchemy has a dialect for, such as PostgreSQL.

For coordinators of tuning runs alone: several of them, on as many machines, write to it at a time, and each goes on
with what any of them has found. Nothing is served from it; look-ups read files. What comes back passes the same rules
as the rows of a file. Writers do not queue up: of two that meet in one row the second does its short transaction again.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, selectinload

from flashgen.codegen.families import validate as validate_config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.history import UNKNOWN, Origin
from flashgen.core.quoting import printable, shown
from flashgen.core.record import Failure, Prediction, Trial, TuningRecord, moment
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.core.workload import Workload
from flashgen.db import reading, rows, writing
from flashgen.db.layout import SCHEMA_VERSION
from flashgen.db.past_rows import origin_of
from flashgen.db.reading import Validate
from flashgen.db.row_reading import R, row_counts
from flashgen.db.schema import Base, DeviceRow, RecordRow, WorkloadRow
from flashgen.db.store import Store
from flashgen.db.stored_trials import StoredTrials
from flashgen.db.urls import parse_url, to_connect, without_secrets
from flashgen.db.writing import Incoming, Merged

CONNECTIONS = 8
"""At a time; the threads of a coordinator with more GPUs take turns, a few milliseconds each."""

GIVE_UP_S = 30.0
"""After this time there is no other attempt at a transaction that met another one, or whose connection was lost: a
server that is started again answers before."""

OPEN_S = 3.0
"""The same of the first transaction: nothing is lost yet, and a name or a password that is wrong stays wrong."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.5
"""Between attempts, doubling, each up to half as long or longer again: writers that met must not meet for ever."""

LOCK_ID = 0x464C474E
"""Of PostgreSQL's advisory lock around the making of tables: two coordinators may come first."""

V = TypeVar("V")


class ServerStore(StoredTrials):
    """One database on a server. Open it with `ServerStore.open`; close it, or use it as a context manager."""

    def __init__(self, url: sa.URL, validate: Validate) -> None:
        """The database at `url`; nothing connects to it yet."""
        self.name = without_secrets(url)
        self.validate = validate
        self._engine = sa.create_engine(
            to_connect(url),
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_pre_ping=True,
            isolation_level="REPEATABLE READ",  # a row that another writer took away in between is an error
        )

    @classmethod
    def open(cls, url: str, *, validate: Validate = validate_config) -> ServerStore:
        """Connect, and make the tables if there are none.

        Args:
            url: as SQLAlchemy takes it, e.g. `postgresql+psycopg://tuner@db/flashgen`; its driver is not flashgen's.
            validate: the check that every config read or written must pass.

        Raises:
            DatabaseError: no such dialect or driver, no connection, or tables of another schema version.
        """
        parsed = parse_url(url)
        name = shown(without_secrets(parsed))
        if parsed.get_backend_name() == "sqlite":
            raise DatabaseError(f"a server's URL is not one of a file, which --db takes; got {name}")
        try:
            store = cls(parsed, validate)
        except (sa.exc.ArgumentError, ImportError, ValueError) as error:
            raise DatabaseError(
                f"a database server has a URL of SQLAlchemy, and its driver is installed; got {name}: {error}"
            ) from None
        try:
            store._run(store._prepare, OPEN_S)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __enter__(self) -> ServerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put_record(self, record: TuningRecord, origin: Origin = UNKNOWN, incoming: Incoming | None = None) -> None:
        """See `Store.put_record`."""
        checked = rows.checked_record(record, self.validate)
        origins = {} if origin == UNKNOWN else {record.identity: origin}
        given = replace(incoming or Incoming(), origins=origins)
        self._run(lambda session: writing.merge_records(session, [checked], None, self.validate, given))

    def put_trial(self, trial: Trial) -> None:
        """See `Store.put_trial`."""
        checked = rows.checked_trial(replace(trial, outcome=_storable(trial.outcome)), self.validate)
        self._run(lambda session: writing.replace_trial(session, checked))

    def put_prediction(self, prediction: Prediction) -> None:
        """See `Store.put_prediction`."""
        checked = rows.checked_prediction(replace(prediction, outcome=_storable(prediction.outcome)), self.validate)
        self._run(lambda session: writing.replace_prediction(session, checked))

    def put_search(self, search: SearchRun) -> None:
        """See `Store.put_search`."""
        checked = rows.checked_search(search)
        self._run(lambda session: writing.replace_search(session, checked))

    def put_finalists(self, finalists: Iterable[Finalist]) -> None:
        """See `Store.put_finalists`."""
        checked = [
            rows.checked_finalist(replace(each, outcome=_storable(each.outcome)), self.validate) for each in finalists
        ]
        self._run(lambda session: writing.add_finalists(session, checked))

    def record(self, workload: Workload, device: Device, *, provenance: str | None = None) -> TuningRecord | None:
        """See `Store.record`."""
        asked = {WorkloadRow.key: workload.key, DeviceRow.identity: device.identity, RecordRow.provenance: provenance}
        found = self._read(_records(asked), self._record)
        return min((record for record, _ in found), key=lambda record: record.provenance, default=None)

    def records(
        self,
        *,
        device: Device | None = None,
        arch: str | None = None,
        specialization: str | None = None,
        provenance: str | None = None,
    ) -> list[TuningRecord]:
        """See `Store.records`."""
        return [record for record, _ in self.made(device, arch, specialization, provenance)]

    def made(
        self,
        device: Device | None = None,
        arch: str | None = None,
        specialization: str | None = None,
        provenance: str | None = None,
    ) -> list[tuple[TuningRecord, Origin]]:
        """As `records`, with who made each."""
        asked = {
            DeviceRow.identity: device.identity if device else None,
            DeviceRow.arch: arch,
            WorkloadRow.specialization: specialization,
            RecordRow.provenance: provenance,
        }
        return sorted(self._read(_records(asked), self._record), key=lambda found: found[0].identity)

    def hand_over(self, target: Store, workloads: Iterable[Workload], device: Device) -> Merged:
        """Write the records of these workloads on a device to a file, where they are newer than what it has.

        Raises:
            DatabaseError: the server does not answer, or the file cannot be written.
        """
        wanted = frozenset(workloads)
        found = [(record, origin) for record, origin in self.made(device) if record.workload in wanted]
        origins = {record.identity: origin for record, origin in found if origin != UNKNOWN}
        return target.merge_records(
            [record for record, _ in found],
            lambda new, old, maker: moment(new.created) > moment(old.created),
            Incoming(reason="import", source="a database server", origins=origins),
        )

    def counts(self) -> dict[str, int]:
        """Number of rows of each table."""
        return self._run(row_counts)

    def _record(self, row: RecordRow) -> tuple[TuningRecord, Origin]:
        return reading.record_of(row, self.validate), UNKNOWN if row.origin is None else origin_of(row.origin)

    def _read(self, query: sa.Select[R], build: Callable[[R], V]) -> list[V]:
        """The value of each row; those that break a rule are left out, and the first one is told."""

        def read(session: Session) -> tuple[list[V], list[str]]:
            values, bad = [], []
            for row in session.scalars(query):
                try:
                    values.append(build(row))
                except sa.exc.SQLAlchemyError:  # noqa: PERF203 - of the connection, not of a value
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a row holds, it must not cost the good ones
                    said = str(error) if isinstance(error, FlashgenError) else f"{type(error).__name__}: {error}"
                    bad.append(f"{row.__tablename__} {row.id} is ignored: {said[:300]}")
            return values, bad

        found, bad = self._run(read)
        if bad:
            warnings.warn(printable(f"{self.name}: {bad[0]} ({len(bad)} rows)", lines=True), stacklevel=3)
        return found

    def _run(self, action: Callable[[Session], V], give_up_s: float | None = None) -> V:
        """Run `action` in a transaction, again where another one was in its way, or the server was not there."""
        until = time.monotonic() + (GIVE_UP_S if give_up_s is None else give_up_s)
        wait_s = FIRST_WAIT_S
        while True:
            try:
                with Session(self._engine, expire_on_commit=False) as session, session.begin():
                    return action(session)
            except (sa.exc.IntegrityError, sa.exc.OperationalError, sa.exc.TimeoutError) as error:
                if time.monotonic() > until:
                    raise self._failed(error) from error
            except sa.exc.SQLAlchemyError as error:
                raise self._failed(error) from error
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _failed(self, error: sa.exc.SQLAlchemyError) -> DatabaseError:
        said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        return DatabaseError(f"a database server must answer and take rows; {self.name}: {said[:300]}")

    def _prepare(self, session: Session) -> None:
        connection = session.connection(execution_options={"isolation_level": "READ COMMITTED"})
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_ID)))
        if not sa.inspect(connection).has_table(_VERSION.name):
            Base.metadata.create_all(connection)
            _VERSION.create(connection)
            connection.execute(_VERSION.insert().values(version_num=SCHEMA_VERSION))
        version = connection.scalar(sa.select(_VERSION.c.version_num))
        if version != SCHEMA_VERSION:
            raise DatabaseError(
                f"tables on a server have schema {SCHEMA_VERSION}; those of {self.name} have {shown(str(version))}: "
                "take an empty database, the records of this one are in the files of its runs"
            )


_VERSION = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


def _storable(outcome: Any) -> Any:
    """An outcome whose reason a server takes: PostgreSQL has no text with a NUL."""
    if isinstance(outcome, Failure):
        return replace(outcome, reason=outcome.reason.replace("\0", "\\x00"))
    return outcome


def _records(asked: dict[Any, str | None]) -> sa.Select[RecordRow]:
    query = sa.select(RecordRow).join(RecordRow.workload).join(RecordRow.device)
    query = query.options(selectinload(RecordRow.baselines), selectinload(RecordRow.origin))
    return query.where(*(column == value for column, value in asked.items() if value is not None))
