"""Times that a report can compare.

A database of a stranger may say of any finite time above 0 that it was measured. Ratios, means and squares of such
numbers leave the range of floats, and one row must not cost the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashgen.core.history import Origin, RunnerUp
from flashgen.core.record import Measurement, Trial, TuningRecord

LEAST_MS, MOST_MS = 1e-6, 1e9
"""One nanosecond, and eleven days."""


def is_plausible(record: TuningRecord, origin: Origin) -> bool:
    """Whether the times of a record, of what was measured beside it and of its rivals can be those of kernels."""
    times_ms = [baseline.median_ms for baseline in record.baselines]
    if record.predicted_ms is not None:
        times_ms.append(record.predicted_ms)
    if record.measurement is not None:
        times_ms += _times_ms(record.measurement)
    for rival in origin.runners_up:
        times_ms += _times_ms(rival)
    return _in_range(times_ms)


def is_plausible_trial(trial: Trial) -> bool:
    """Whether the times of a trial can be those of a kernel, as those of one without any."""
    return not isinstance(trial.outcome, Measurement) or _in_range(_times_ms(trial.outcome))


def _times_ms(outcome: Measurement | RunnerUp) -> Iterator[float]:
    yield from (*outcome.times_ms, *outcome.hard_times_ms)
    for _, times_ms in outcome.profile_times_ms:
        yield from times_ms
    if isinstance(outcome, Measurement) and outcome.reference_ms is not None:
        yield outcome.reference_ms


def _in_range(times_ms: Iterable[float]) -> bool:
    return all(LEAST_MS <= time_ms <= MOST_MS for time_ms in times_ms)
