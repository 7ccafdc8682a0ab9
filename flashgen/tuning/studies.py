"""Searches as studies in a storage of Optuna, which `optuna-dashboard` and Optuna's own plots open.

There is one study for each workload and device. Its parameters are the kernel family and, since families have different
knobs, the knobs of each family by the name of both; its value is the time in ms. The search itself does not run in the
storage: a trial is written there once its outcome is known, so a slow or broken storage costs no candidate.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES, family
from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import printable
from flashgen.core.record import Failure, Trial, moment
from flashgen.core.settings import settings
from flashgen.db.urls import parse_url, to_connect
from flashgen.tuning.events import Event, TrialFinished, Warned
from flashgen.tuning.quiet import Quiet
from flashgen.tuning.study_files import check_study

FAMILY = "family"
"""The parameter that says which knobs a trial has."""

METRIC = "ms"

MARK = ("run", "created", "config")
"""The attributes of a trial that tell it from all others of its study."""

OPENING_WAITS_S = (0.1, 0.2, 0.4, 0.8)
"""Between attempts to open a storage: Optuna looks for tables and makes those that are missing, without a lock."""


class Studies:
    """The studies of one storage. Open it with `Studies.open`."""

    def __init__(self, storage: optuna.storages.BaseStorage) -> None:
        """The studies of an open storage."""
        self._storage = storage
        self._open: dict[str, tuple[optuna.Study, set[tuple[object, ...]]]] = {}

    @classmethod
    def open(cls, url: str) -> Studies:
        """Connect to a storage, and make its tables if there are none.

        Args:
            url: as Optuna takes it, e.g. `sqlite:///studies.db`; a path without `://` is a file of its journal.

        Raises:
            DatabaseError: there is no such storage, or it is one that `check_study` refuses, such as a tuning database.
        """
        check_study(url, settings().db_layers)
        try:
            with Quiet():
                if "://" in url:
                    return cls(_storage(to_connect(parse_url(url)).render_as_string(False)))
                backend = JournalFileBackend(url)
                return cls(optuna.storages.JournalStorage(backend))
        except Exception as error:  # noqa: BLE001 - of SQLAlchemy, of its drivers, of a file: each has its own errors
            raise DatabaseError(f"a study needs a storage that Optuna can open, got {_said(error)}") from None

    def put(self, trial: Trial) -> bool:
        """Add a trial to the study of its workload and device; whether it was not there.

        Raises:
            DatabaseError: the storage cannot be written, or the study was begun with other values of a knob.
        """
        try:
            with Quiet():
                study, known = self._study(trial)
                made = frozen(trial)
                mark = tuple(made.user_attrs[name] for name in MARK)
                if mark in known:
                    return False
                study.add_trial(made)
                known.add(mark)
                return True
        except Exception as error:  # noqa: BLE001 - as at opening
            name = study_name(trial)
            raise DatabaseError(f"a study must be open to new trials, and {name} is not: {_said(error)}") from None

    def _study(self, trial: Trial) -> tuple[optuna.Study, set[tuple[object, ...]]]:
        name = study_name(trial)
        if name not in self._open:
            study = optuna.create_study(
                storage=self._storage, study_name=name, direction="minimize", load_if_exists=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([METRIC])
            study.set_user_attr("workload", trial.workload.key)
            study.set_user_attr("device", trial.device.name)
            found = (each.user_attrs for each in study.get_trials(deepcopy=False))
            marks = {tuple(attrs.get(name) for name in MARK) for attrs in found}
            self._open[name] = study, marks
        return self._open[name]


class Mirror:
    """Writes every trial that a run tells of to a storage; without one, or once it has failed, nothing."""

    def __init__(self, url: str | None) -> None:
        """Connect, where there is a storage.

        Raises:
            DatabaseError: there is none at the URL.
        """
        self._studies = None if url is None else Studies.open(url)

    def __call__(self, event: Event) -> tuple[Warned, ...]:
        """Write the trial of an event, and say what should be told of that."""
        if self._studies is not None and isinstance(event, TrialFinished):
            try:
                self._studies.put(event.trial)
            except DatabaseError as error:
                self._studies = None
                return (Warned(message=f"{error}; the search goes on without it"),)
        return ()


def export_studies(trials: Iterable[Trial], url: str) -> tuple[int, int]:
    """Write trials to a storage; those that are there stay as they are.

    Returns:
        How many were written, and how many there were.

    Raises:
        DatabaseError: there is no trial, or the storage cannot be written.
    """
    every = list(trials)
    if not every:
        raise DatabaseError(
            "an export to Optuna needs trials, and none is stored here: records and predictions are no trials"
        )
    studies = Studies.open(url)
    return sum(studies.put(trial) for trial in every), len(every)


def study_name(trial: Trial) -> str:
    """The name of the study that a trial belongs to."""
    return f"{trial.workload.key} {trial.device.identity}"


def frozen(trial: Trial) -> optuna.trial.FrozenTrial:
    """A trial as Optuna has it; what failed has no value, and its reason is among the attributes."""
    outcome, row = trial.outcome, family(trial.config.family)
    failure = outcome if isinstance(outcome, Failure) else None
    peers = tuple(each.id for each in (*FAMILIES, *DECODE_FAMILIES) if each.direction == row.direction)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        FAMILY: optuna.distributions.CategoricalDistribution(peers)
    }
    for knob in row.knobs:
        distributions[f"{row.id}.{knob.name}"] = optuna.distributions.CategoricalDistribution(knob.values)
    made = optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if failure is None else optuna.trial.TrialState.FAIL,
        value=None if isinstance(outcome, Failure) else outcome.median_ms,
        params={FAMILY: row.id, **{f"{row.id}.{name}": value for name, value in trial.config.knobs}},
        distributions=distributions,
        user_attrs=_attributes(trial),
    )
    if trial.created:
        ended = moment(trial.created).astimezone().replace(tzinfo=None)  # Optuna's times are local ones
        made.datetime_start = ended - timedelta(seconds=trial.evaluate_s or 0.0)
        made.datetime_complete = ended
    return made


def _storage(url: str) -> optuna.storages.BaseStorage:
    """A storage in a database, opened again where another process made the same tables or rows at the same moment."""
    for wait_s in OPENING_WAITS_S:
        try:
            return optuna.storages.get_storage(url)
        except Exception as error:  # noqa: PERF203 - SQLAlchemy's; that of a connection has no statement
            if getattr(error, "statement", None) is None:
                raise
            time.sleep(wait_s * random.uniform(0.5, 1.5))
    return optuna.storages.get_storage(url)


def _attributes(trial: Trial) -> dict[str, Any]:
    outcome, compiled = trial.outcome, trial.compiled
    found = {
        "run": trial.run,
        "created": trial.created,
        "config": str(trial.config),
        "number": trial.number,
        "source": trial.source,
        "predicted_ms": trial.predicted_ms,
        "elapsed_s": trial.elapsed_s,
        "failure": str(outcome) if isinstance(outcome, Failure) else None,
        "time_over_reference": None if isinstance(outcome, Failure) else outcome.reference_ratio,
    }
    if compiled is not None:
        found |= {name: getattr(compiled, name) for name in ("registers", "spills", "shared_bytes", "occupancy")}
    return {name: value for name, value in found.items() if value is not None}


def _said(error: Exception) -> str:
    """The first line of another library's error."""
    return printable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")[:300]
