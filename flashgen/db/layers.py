"""`Layers`: the user's tuning database over packaged and shipped ones; none is able to stop the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from flashgen.codegen.families import validate as validate_config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.quoting import printable
from flashgen.core.record import Prediction, Trial, TuningRecord
from flashgen.core.settings import settings, shipped
from flashgen.core.workload import Workload
from flashgen.db import packages
from flashgen.db.reader import Reader
from flashgen.db.reading import Validate

if TYPE_CHECKING:
    from flashgen.core.search_log import SearchLog
    from flashgen.db.past import Past
    from flashgen.db.store import Store

Found = tuple[TuningRecord, str]
"""A record and the name of the layer it came from."""

PACKAGED, SHIPPED = "packaged/", "shipped/"
"""What the names of layers below the user's begin with."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One database and its name.

    The name is the path of a user's file, `packaged/<name>` of an installed package's, `shipped/<device>` of one of
    ours.
    """

    name: str
    reader: Reader

    @property
    def store(self) -> Store:
        """What else than records there is in the file; look-ups do without, and so without SQLAlchemy."""
        from flashgen.db.store import Store

        return Store(self.reader)


def shipped_databases() -> dict[str, Path]:
    """The database of each device that ships with flashgen, by the name of its folder in `tuning_db/`, in order."""
    return {path.parent.name: path for path in sorted(shipped("tuning_db").glob(f"*/{packages.FILE}"))}


class Layers:
    """Databases searched first to last. Look-ups never create, write or migrate a file in place.

    A layer that cannot be used (foreign, corrupt, newer, unreadable, not signed) is left out with one warning that
    names the file and the reason, at opening or at the look-up that finds out; the others serve.
    """

    def __init__(self, layers: Sequence[Layer], *, first: Path, validate: Validate = validate_config) -> None:
        self._layers = list(layers)
        self._first = first
        self._validate = validate
        self._writable: Store | None = None

    @classmethod
    def open(cls, paths: Sequence[Path] | None = None, *, validate: Validate = validate_config) -> Layers:
        """Open the layers of `settings()` (FLASHGEN_DB, or the user's file), of packages, and the shipped files.

        Args:
            paths: the user layers instead of those of `settings()`; the first one is the one to write to.
            validate: the check that every config must pass.
        """
        user = tuple(paths) if paths else settings().db_layers
        wanted = [(str(path), path, False) for path in user if not is_absent(path)]
        # a user layer that is not there yet is empty, which is no reason to warn
        wanted += [(f"{PACKAGED}{name}", path, True) for name, path in packages.installed().items()]
        foreign = {name for name, _, _ in wanted} - {str(user[0])}  # what is written to is one's own
        wanted += [(f"{SHIPPED}{name}", path, True) for name, path in shipped_databases().items()]
        layers = []
        for name, path, immutable in wanted:
            try:
                reader = Reader.open(path, shipped=immutable, foreign=name in foreign, validate=validate)
                layers.append(Layer(name=name, reader=reader))
            except Exception as error:  # noqa: BLE001, PERF203 - whatever a layer does, it must not cost the others
                _warn(name, error)
        return cls(layers, first=user[0], validate=validate)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that can be used, first to last."""
        return tuple(self._layers)

    @property
    def first_name(self) -> str:
        """The name of the layer that is written to, whether its file exists yet or not."""
        return str(self._first)

    @property
    def writable(self) -> Store:
        """The first user layer, open for writing; created and migrated on first use.

        Raises:
            DatabaseError: it cannot be written; the message names it.
        """
        from flashgen.db.store import Store

        if self._writable is None:
            self._writable = Store.open(self._first, validate=self._validate)
            if not any(layer.name == self.first_name for layer in self._layers):
                self._layers.insert(0, Layer(name=self.first_name, reader=self._writable.reader))
        return self._writable

    def record(self, workload: Workload, device: Device, *, provenance: str | None = None) -> Found | None:
        """The record of exactly this workload on this device identity: any measured one before any predicted one.

        Args:
            workload: the workload.
            device: its identity counts.
            provenance: only `measured` or only `predicted` records.
        """
        for wanted in ("measured", "predicted"):
            if provenance in (None, wanted):
                for layer in tuple(self._layers):
                    record = self._ask(layer, lambda reader: reader.record(workload, device, provenance=wanted))  # noqa: B023
                    if record is not None:
                        return record, layer.name
        return None

    def records(
        self,
        *,
        device: Device | None = None,
        arch: str | None = None,
        specialization: str | None = None,
        provenance: str | None = None,
    ) -> list[Found]:
        """The records of all layers, narrowed as in `Reader.records`; an earlier layer's record hides a later one's."""
        found: dict[tuple[str, ...], Found] = {}
        for layer in tuple(self._layers):
            records = self._ask(
                layer,
                lambda reader: reader.records(
                    device=device, arch=arch, specialization=specialization, provenance=provenance
                ),
            )
            for record in records or ():
                found.setdefault(record.identity, (record, layer.name))
        return list(found.values())

    def of_class(self, specialization: str, device: Device) -> list[Found]:
        """`Reader.of_class` of each layer, first to last.

        None hides another one: a look-up needs those of later layers where the first cannot serve.
        """
        answers = {
            layer.name: self._ask(layer, lambda reader: reader.of_class(specialization, device))
            for layer in tuple(self._layers)
        }
        return [(record, name) for name, records in answers.items() for record in records or ()]

    def tried(self, workload: Workload, device: Device) -> tuple[list[Trial], list[Prediction]]:
        """The trials and the predictions of a workload on a device identity, of all layers, each once."""
        trials: dict[Trial, None] = {}
        predictions: dict[Prediction, None] = {}
        for layer in tuple(self._layers):
            found = self._ask(layer, lambda _: _tried(layer.store, workload, device))  # noqa: B023
            if found is not None:
                trials |= dict.fromkeys(found[0])
                predictions |= dict.fromkeys(found[1])
        return list(trials), list(predictions)

    def searches(
        self,
        *,
        workload: Workload | None = None,
        device: Device | None = None,
        run: str | None = None,
        first_only: bool = False,
    ) -> list[tuple[SearchLog, str]]:
        """What searches tried, each once, with the name of its layer; narrowed by what is given.

        Args:
            workload: what was searched for.
            device: of this device identity.
            run: of this run.
            first_only: only those in the layer that is written to.
        """
        from flashgen.db.trials import without_copies

        found: list[tuple[SearchLog, str]] = []
        for layer in tuple(self._layers):
            if first_only and layer.name != self.first_name:
                continue
            logs = self._ask(layer, lambda _: _searched(layer.store, workload, device, run))  # noqa: B023
            found += [(log, layer.name) for log in logs or ()]
        return without_copies(found)

    def past(self, workload: Workload, device: Device | None = None) -> list[tuple[Past, str]]:
        """Who made the records of a workload and what they took the place of, by layer, with its name."""
        from flashgen.db.past import past_of  # which no look-up needs

        found: list[tuple[Past, str]] = []
        for layer in tuple(self._layers):
            past = self._ask(layer, lambda reader: past_of(reader, workload, device))
            if past is not None and (past.records or past.replaced):
                found.append((past, layer.name))
        return found

    def close(self) -> None:
        """Close every file."""
        if self._writable is not None:
            self._writable.close()

    def __enter__(self) -> Layers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, layer: Layer, question: Callable[[Reader], V]) -> V | None:
        try:
            return question(layer.reader)
        except Exception as error:  # noqa: BLE001 - as at opening
            _warn(layer.name, error)
            self._layers = [other for other in self._layers if other is not layer]
            return None


def _tried(store: Store, workload: Workload, device: Device) -> tuple[list[Trial], list[Prediction]]:
    with store:
        return store.trials(workload, device), store.predictions(workload, device)


def _searched(store: Store, workload: Workload | None, device: Device | None, run: str | None) -> list[SearchLog]:
    from flashgen.db.trials import search_logs

    with store:
        counts = store.counts()
        if not counts["trials"] + counts["searches"]:  # as in what ships, which has hundreds of workloads
            return []
        workloads = [workload] if workload else store.workloads()
        return list(search_logs(store, workloads, [device] if device else store.devices(), run))


def is_absent(path: Path) -> bool:
    """Whether a user layer is not there yet, which is no reason to warn; opening what nobody can look at says so."""
    try:
        return not path.exists()
    except OSError:
        return False


def _warn(name: str, error: Exception) -> None:
    reason = str(error) if isinstance(error, FlashgenError) else f"{type(error).__name__}: {str(error)[:300]}"
    warnings.warn(printable(f"tuning database {name} is not used: {reason}", lines=True), stacklevel=3)
