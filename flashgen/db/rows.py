"""From frozen values to rows, and values as they would be read back."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from flashgen.core.compiled import Compiled
from flashgen.core.device import Device
from flashgen.core.history import Origin, Replaced
from flashgen.core.record import Failure, Measurement, Prediction, Trial, TuningRecord
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.core.workload import Workload
from flashgen.db.past_rows import name_of, origin_columns
from flashgen.db.reader import OWN
from flashgen.db.reading import MAX_BASELINES, PREDICTED_SOURCE, Validate, plain, prediction_of, record_of
from flashgen.db.schema import (
    BaselineRow,
    DeviceRow,
    FinalistRow,
    OriginRow,
    RecordRow,
    ReplacedRow,
    SearchRow,
    TrialRow,
    WorkloadRow,
)
from flashgen.db.trial_rows import TAKEN, finalist_of, search_of, trial_of


def device_row(device: Device) -> DeviceRow:
    """The row of a device."""
    return DeviceRow(identity=device.identity, **asdict(device))


def workload_row(workload: Workload) -> WorkloadRow:
    """The row of a workload."""
    return WorkloadRow(key=workload.key, specialization=workload.specialization.workload_class, **asdict(workload))


def record_row(record: TuningRecord, workload: WorkloadRow, device: DeviceRow) -> RecordRow:
    """The row of a record, its baselines included."""
    return RecordRow(
        workload=workload,
        device=device,
        provenance=record.provenance,
        family=record.config.family,
        knobs=record.config.to_json(),
        **_measurement_columns(record.measurement),
        hard_times_ms=_hard_times_column(record.measurement),
        predicted_ms=record.predicted_ms,
        source_digest=record.source_digest,
        **{f"{name}_version": version for name, version in asdict(record.versions).items()},
        created=record.created,
        confidence=record.measurement.confidence if record.measurement else None,
        **asdict(record.limits),
        baselines=[BaselineRow(impl=baseline.impl, median_ms=baseline.median_ms) for baseline in record.baselines],
    )


def origin_row(origin: Origin) -> OriginRow:
    """The row of an origin, which belongs to a record."""
    return OriginRow(**origin_columns(origin))


def replaced_row(replaced: Replaced, workload: WorkloadRow, device: DeviceRow) -> ReplacedRow:
    """The row of a record that was replaced in another file."""
    old = record_row(replaced.record, workload, device)
    return ReplacedRow(
        workload=workload,
        device=device,
        **{name: getattr(old, name) for name in OWN},
        anchors=anchors_column(old),
        **origin_columns(replaced.origin),
        moment=replaced.moment,
        reason=replaced.reason,
        source=name_of(replaced.source),
    )


def anchors_column(old: RecordRow) -> str:
    """The baselines of a record in one text, whatever their rows hold."""
    return json.dumps({str(each.impl): each.median_ms for each in old.baselines[:MAX_BASELINES]}, default=str)


def trial_row(trial: Trial, workload: WorkloadRow, device: DeviceRow) -> TrialRow:
    """The row of a trial, whether it was measured or failed."""
    failure = trial.outcome if isinstance(trial.outcome, Failure) else None
    measurement = trial.outcome if isinstance(trial.outcome, Measurement) else None
    return TrialRow(
        workload=workload,
        device=device,
        family=trial.config.family,
        knobs=trial.config.to_json(),
        source=trial.source,
        stage=failure.stage if failure else None,
        reason=plain(failure.reason) if failure else None,
        **_measurement_columns(measurement),
        created=trial.created,
        run=trial.run,
        number=trial.number,
        **_compiled_columns(trial.compiled),
        predicted_ms=trial.predicted_ms,
        evaluate_s=trial.evaluate_s,
        elapsed_s=trial.elapsed_s,
    )


def search_row(search: SearchRun, workload: WorkloadRow, device: DeviceRow) -> SearchRow:
    """The row of a search."""
    return SearchRow(
        workload=workload,
        device=device,
        run=search.run,
        host=name_of(search.host),
        seed=search.seed,
        budget=search.budget,
        candidates=search.candidates,
        settings=_compact(dict(search.settings)),
        **{f"{name}_version": version for name, version in asdict(search.versions).items()},
        state=_compact(dict(search.state)),
        created=search.created,
    )


def finalist_row(finalist: Finalist, workload: WorkloadRow, device: DeviceRow) -> FinalistRow:
    """The row of a config in a race, whether it was measured or failed."""
    failure = finalist.outcome if isinstance(finalist.outcome, Failure) else None
    measurement = finalist.outcome if isinstance(finalist.outcome, Measurement) else None
    return FinalistRow(
        workload=workload,
        device=device,
        run=finalist.run,
        race=finalist.race,
        stage=finalist.stage,
        family=finalist.config.family,
        knobs=finalist.config.to_json(),
        failed_stage=failure.stage if failure else None,
        reason=plain(failure.reason) if failure else None,
        **_measurement_columns(measurement),
        hard_times_ms=_hard_times_column(measurement),
        created=finalist.created,
    )


def prediction_row(prediction: Prediction, workload: WorkloadRow, device: DeviceRow) -> TrialRow:
    """The row of a prediction, whether it has a time or failed."""
    failure = prediction.outcome if isinstance(prediction.outcome, Failure) else None
    return TrialRow(
        workload=workload,
        device=device,
        family=prediction.config.family,
        knobs=prediction.config.to_json(),
        source=PREDICTED_SOURCE,
        stage=failure.stage if failure else None,
        reason=plain(failure.reason) if failure else None,
        times_ms=None if failure else json.dumps([prediction.outcome]),
        created=prediction.created,
    )


def checked_record(record: TuningRecord, validate: Validate) -> TuningRecord:
    """The record as it would be read back: its config has every knob of its family.

    Raises:
        FlashgenError: it breaks a rule that every row must pass when it is read.
    """
    return record_of(record_row(record, workload_row(record.workload), device_row(record.device)), validate)


def checked_trial(trial: Trial, validate: Validate) -> Trial:
    """The trial as it would be read back, as `checked_record` does."""
    return trial_of(trial_row(trial, workload_row(trial.workload), device_row(trial.device)), validate)


def checked_search(search: SearchRun) -> SearchRun:
    """The search as it would be read back, as `checked_record` does."""
    return search_of(search_row(search, workload_row(search.workload), device_row(search.device)))


def checked_finalist(finalist: Finalist, validate: Validate) -> Finalist:
    """The finalist as it would be read back, as `checked_record` does."""
    return finalist_of(finalist_row(finalist, workload_row(finalist.workload), device_row(finalist.device)), validate)


def checked_prediction(prediction: Prediction, validate: Validate) -> Prediction:
    """The prediction as it would be read back, as `checked_record` does."""
    owners = workload_row(prediction.workload), device_row(prediction.device)
    return prediction_of(prediction_row(prediction, *owners), validate)


def _measurement_columns(measurement: Measurement | None) -> dict[str, Any]:
    if measurement is None:
        return {}
    profiles = json.dumps(dict(measurement.profile_times_ms)) if measurement.profile_times_ms else None
    columns = {**asdict(measurement), "times_ms": json.dumps(measurement.times_ms), "profile_times_ms": profiles}
    del columns["hard_times_ms"], columns["confidence"]  # of records alone
    return columns


def _hard_times_column(measurement: Measurement | None) -> str | None:
    return json.dumps(measurement.hard_times_ms) if measurement and measurement.hard_times_ms else None


def _compiled_columns(compiled: Compiled | None) -> dict[str, Any]:
    if compiled is None:
        return {"source_digest": ""}
    parts = {entry: [getattr(part, name) for name in TAKEN] for entry, part in compiled.parts}
    return {
        **{name: getattr(compiled, name) for name in TAKEN},
        "compile_ms": compiled.compile_ms,
        "source_digest": compiled.source_digest,
        "parts": _compact(parts) if parts else None,
    }


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
