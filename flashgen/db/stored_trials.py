"""What searches wrote down, read again: the same of a file and of a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

from flashgen.core.device import Device
from flashgen.core.record import Prediction, Trial
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.core.workload import Workload
from flashgen.db import reading, trial_rows
from flashgen.db.reading import Validate
from flashgen.db.row_reading import R
from flashgen.db.schema import DeviceRow, FinalistRow, SearchRow, TrialRow, WorkloadRow

T = TypeVar("T", TrialRow, SearchRow, FinalistRow)
V = TypeVar("V")


class StoredTrials(ABC):
    """A database of which the trials, predictions, searches and finals of a workload are asked."""

    validate: Validate

    @abstractmethod
    def _read(self, query: sa.Select[R], build: Callable[[R], V]) -> list[V]:
        """The value of each row; those that break a rule are left out and told."""

    def trials(self, workload: Workload, device: Device) -> list[Trial]:
        """Every trial of a workload on a device identity, of all runs, in the order they were stored."""
        query = _of(TrialRow, workload, device).where(TrialRow.source.is_distinct_from(reading.PREDICTED_SOURCE))
        return self._read(query, lambda row: trial_rows.trial_of(row, self.validate))

    def predictions(self, workload: Workload, device: Device) -> list[Prediction]:
        """Every prediction of a workload for a device identity, in the order they were stored."""
        query = _of(TrialRow, workload, device).where(TrialRow.source == reading.PREDICTED_SOURCE)
        return self._read(query, lambda row: reading.prediction_of(row, self.validate))

    def searches(self, workload: Workload, device: Device) -> list[SearchRun]:
        """How every search for a workload on a device identity was asked for, in the order they began."""
        return self._read(_of(SearchRow, workload, device), trial_rows.search_of)

    def finalists(self, workload: Workload, device: Device) -> list[Finalist]:
        """What every config did in each race of a workload's finals on a device identity, in the order of the races."""
        return self._read(_of(FinalistRow, workload, device), lambda row: trial_rows.finalist_of(row, self.validate))


def _of(table: type[T], workload: Workload, device: Device) -> sa.Select[T]:
    query = sa.select(table).join(table.workload).join(table.device).order_by(table.id)
    return query.where(WorkloadRow.key == workload.key, DeviceRow.identity == device.identity)
