"""From rows to frozen values: reading trusts nothing.

SQLite stores any type in any column and anybody may have written the file, so each value is checked for its type first,
then the frozen value's own rules apply, and the identity stored beside it must be the one that the value computes.
A row is whatever has its columns as attributes: of `flashgen.db.schema`, or of `flashgen.db.reader`, which does without
SQLAlchemy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.core.checks import TIMES, are_times
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError
from flashgen.core.peak import why_unreachable
from flashgen.core.record import (
    Baseline,
    Failure,
    Limits,
    Measurement,
    Prediction,
    TuningRecord,
    Versions,
    moment,
)
from flashgen.core.workload import Workload

if TYPE_CHECKING:
    from flashgen.db.schema import BaselineRow, DeviceRow, FinalistRow, RecordRow, TrialRow, WorkloadRow

Validate = Callable[[Config], Config]
"""Returns the config, with the knobs its family got since, or raises ConfigError (`codegen.families.validate`)."""

MAX_TEXT = 16384
"""Characters of one stored text; longer than any real one, short enough to refuse a flood before it is parsed."""

MAX_NAME = 512
"""Characters of a name, a key, a version or a date; as many as there are rows are held at once."""

LONG_TEXTS = frozenset(
    {
        *("knobs", "times_ms", "hard_times_ms", "profile_times_ms", "reason", "anchors", "runners_up"),
        *("parts", "settings", "state"),
    }
)
"""What may have `MAX_TEXT` characters."""

MAX_BASELINES = 64
"""Other implementations beside one record; torch has four."""

MAX_SEQUENCES = 2**17
"""Of a step of decoding, or packed; no GPU holds the caches of as many."""

YEARS = range(2020, 2100)
"""Of what was made with flashgen."""

MAX_CLOCK_MHZ = 10_000

PREDICTED_SOURCE = "predicted"
"""The source of a row of trials that nothing measured: such a row is a `Prediction`, and every other one a `Trial`."""

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}

T = TypeVar("T", Workload, Device)
P = TypeVar("P")
J = TypeVar("J", list[Any], dict[str, Any])


def device_of(row: DeviceRow) -> Device:
    """The device of a row.

    Raises:
        FlashgenError: the row breaks a rule, here and in the functions below.
    """
    device = _value(Device, row)
    if row.identity != device.identity:
        raise DatabaseError(
            f"a device's identity must be the one of its fields ({device.identity}), got {_quoted(row.identity)}"
        )
    return device


def workload_of(row: WorkloadRow) -> Workload:
    """The workload of a row."""
    workload = _value(Workload, row)
    if workload.has_profiles and workload.batch > MAX_SEQUENCES:  # whose lengths are listed one by one
        raise DatabaseError(f"a batch has at most {MAX_SEQUENCES} sequences, got {workload.batch}")
    stored, spec = (row.key, row.specialization), workload.specialization
    if stored not in ((workload.key, spec.workload_class), (workload.key, spec.former_class)):
        raise DatabaseError(f"a workload's key must be the one of its fields ({workload.key}), got {_quoted(stored)}")
    return workload


def record_of(row: RecordRow, validate: Validate) -> TuningRecord:
    """The record of a row; `validate` has accepted its config."""
    names = [field.name for field in fields(Versions)]
    record = TuningRecord(
        workload=workload_of(present(row.workload, "workload")),
        device=device_of(present(row.device, "device")),
        config=config_of(row, validate),
        provenance=typed("provenance", row.provenance, "str"),
        measurement=None if row.times_ms is None else _raced(row),
        predicted_ms=_predicted(row.predicted_ms),
        source_digest=typed("source_digest", row.source_digest, "str"),
        versions=Versions(**{name: typed(name, getattr(row, f"{name}_version"), "str") for name in names}),
        baselines=tuple(_baseline(baseline) for baseline in row.baselines),
        created=as_moment("created", row.created),
        limits=Limits(
            **{each.name: typed(each.name, getattr(row, each.name), "float | None") for each in fields(Limits)}
        ),
    )
    refuse_impossible(record.workload, record.device, record.measurement or record.predicted_ms)
    return record


def prediction_of(row: TrialRow, validate: Validate) -> Prediction:
    """The prediction of a row; `validate` has accepted its config."""
    prediction = Prediction(
        workload=workload_of(present(row.workload, "workload")),
        device=device_of(present(row.device, "device")),
        config=config_of(row, validate),
        outcome=failure_of(row.stage, row.reason) if row.times_ms is None else _predicted_time(row),
        created=as_moment("created", row.created),
    )
    refuse_impossible(prediction.workload, prediction.device, prediction.outcome)
    return prediction


def failure_of(stage: object, reason: object) -> Failure:
    """The failure that two cells tell of."""
    return Failure(stage=typed("stage", stage, "str"), reason=typed("reason", reason, "str"))


def _times_ms(value: object, name: str = "times_ms") -> tuple[float, ...]:
    return _list_of_times(parsed(name, value, list), name)


def _profile_times_ms(value: object) -> tuple[tuple[str, tuple[float, ...]], ...]:
    name = "profile_times_ms"
    found = {} if value is None else parsed(name, value, dict)
    if value is not None and not found:
        raise DatabaseError(f"{name} must name a profile, got {_quoted(value)}")
    return tuple((profile, _list_of_times(times, name)) for profile, times in found.items())


def parsed(name: str, value: object, kind: type[J]) -> J:
    """What a text of JSON holds, which is a list or an object.

    Raises:
        DatabaseError: it is no such text.
    """
    what = {list: "list", dict: "object"}[kind]
    try:
        found = json.loads(typed(name, value, "str"))
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{name} must be a JSON {what}, got {_quoted(value)}") from error
    if not isinstance(found, kind):
        raise DatabaseError(f"{name} must be a JSON {what}, got {_quoted(value)}")
    return found


def _list_of_times(times: object, name: str) -> tuple[float, ...]:
    if not isinstance(times, list):
        raise DatabaseError(f"{name} must have lists of times, got {_quoted(times)}")
    try:
        return tuple(float(typed(name, time, "float")) for time in times)
    except OverflowError as error:
        raise DatabaseError(f"{name} must be finite, got {_quoted(times)}") from error


def _predicted_time(row: TrialRow) -> float:
    times = _times_ms(row.times_ms)
    if len(times) != 1 or not are_times(times):
        raise DatabaseError(f"a prediction has one time, and {TIMES}, got {_quoted(row.times_ms)}")
    return times[0]


def measurement_of(row: RecordRow | TrialRow | FinalistRow, hard: str | None = None) -> Measurement:
    """The measurement of a row that has times; `hard` are those on hard data."""
    measured = Measurement(
        times_ms=_times_ms(row.times_ms),
        max_error=typed("max_error", row.max_error, "float"),
        mean_error=typed("mean_error", row.mean_error, "float"),
        reference_ms=typed("reference_ms", row.reference_ms, "float | None"),
        sm_clock_mhz=typed("sm_clock_mhz", row.sm_clock_mhz, "float | None"),
        hard_times_ms=() if hard is None else _times_ms(hard, "hard_times_ms"),
        profile_times_ms=_profile_times_ms(row.profile_times_ms),
    )
    if not 0 <= measured.mean_error <= measured.max_error:
        raise DatabaseError(
            f"errors are 0 or more, the mean at most the largest, got {measured.mean_error} and {measured.max_error}"
        )
    if measured.sm_clock_mhz is not None and not 0 <= measured.sm_clock_mhz <= MAX_CLOCK_MHZ:
        raise DatabaseError(f"sm_clock_mhz must be in [0, {MAX_CLOCK_MHZ}], got {measured.sm_clock_mhz}")
    return measured


def _raced(row: RecordRow) -> Measurement:
    """The measurement of a record, with what its last race was sure of."""
    sure = typed("confidence", row.confidence, "float | None")
    return replace(measurement_of(row, row.hard_times_ms), confidence=sure)


def refuse_impossible(workload: Workload, device: Device, outcome: Measurement | Failure | float | None) -> None:
    """Refuse a time that nothing reaches: it would win every comparison.

    Raises:
        DatabaseError: there is one.
    """
    if outcome is None or isinstance(outcome, Failure):
        return
    if isinstance(outcome, Measurement):
        others = [profile.lengths for profile in workload.profiles[1:]]
        for name, _ in outcome.profile_times_ms:
            if name not in others:
                raise DatabaseError(f"{workload.key} is measured on the profiles {others}, got {_quoted(name)}")
    reason = why_unreachable(workload, device, outcome)
    if reason is not None:
        raise DatabaseError(reason)


def config_of(row: RecordRow | TrialRow | FinalistRow, validate: Validate) -> Config:
    """The config of a row, accepted by `validate`."""
    family = typed("family", row.family, "str")
    return validate(Config.from_json(family, typed("knobs", row.knobs, "str")))


def _baseline(row: BaselineRow) -> Baseline:
    return Baseline(impl=typed("impl", row.impl, "str"), median_ms=typed("median_ms", row.median_ms, "float"))


def _predicted(value: object) -> float | None:
    predicted: float | None = typed("predicted_ms", value, "float | None")
    if predicted is not None and not are_times([predicted]):
        raise DatabaseError(f"of a prediction {TIMES}, got {predicted}")
    return predicted


def as_moment(name: str, value: object) -> str:
    """An ISO 8601 time of these years, or an empty text.

    Raises:
        DatabaseError: it is neither.
    """
    text: str = typed(name, value, "str")
    try:
        if text and moment(text).year not in YEARS:
            raise DatabaseError(f"{name} must be in the years {YEARS.start} to {YEARS[-1]}, got {_quoted(text)}")
    except (ValueError, OverflowError) as error:
        raise DatabaseError(f"{name} must be an ISO 8601 time, got {_quoted(text)}") from error
    return text


def present(row: P | None, name: str) -> P:
    """A row that another one points to.

    Raises:
        DatabaseError: there is none.
    """
    if row is None:
        raise DatabaseError(f"a row must point to its {name}, got a number without one")
    return row


def _value(cls: type[T], row: object) -> T:
    values = {field.name: typed(field.name, getattr(row, field.name), str(field.type)) for field in fields(cls)}
    return cls(**values)


def typed(name: str, value: object, kind: str) -> Any:
    """`value`, if it has exactly the type that `kind` (an annotation) names; a float is finite, a text printable.

    Raises:
        DatabaseError: it has not, or it is a longer text than its column may hold.
    """
    allowed = _TYPES[kind]
    if type(value) not in allowed:
        raise DatabaseError(f"{name} must be of type {kind}, got {_quoted(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DatabaseError(f"{name} must be finite, got {value}")
    if isinstance(value, str):
        longest = MAX_TEXT if name in LONG_TEXTS else MAX_NAME
        if len(value) > longest or not (value.isprintable() or value == plain(value)):
            raise DatabaseError(f"{name} must be at most {longest} printable characters, got {_quoted(value)}")
    return value


def plain(text: str) -> str:
    """The text without what could steer a terminal: compilers colour their messages."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else " " for character in text[:MAX_TEXT]
    )


def _quoted(value: object) -> str:
    """A short form of a value nobody vouches for: escaped, so that it cannot steer a terminal."""
    if isinstance(value, int) and abs(value) > 2**64:
        return "an integer above 2^64"
    text = value if isinstance(value, str) else repr(value)
    return ascii(text[:60])
