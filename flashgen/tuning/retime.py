"""Records measured again on this GPU: whether one keeps its promise, and which of two databases' records is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flashgen.codegen.render import source_digest
from flashgen.core.config import Config
from flashgen.core.peak import believed
from flashgen.core.record import Failure, Limits, Measurement, TuningRecord, timestamp
from flashgen.core.workload import Workload
from flashgen.db.comparison import Pair
from flashgen.measure.protocol import Executor, RaceJob
from flashgen.measure.sequential import Rule, beats
from flashgen.tuning.finals import Finals, confidence, round_times

BROKEN_PROMISE = 0.1
"""How much slower than its record a kernel may be: two cards of one model differ by half of that."""

Raced = dict[Config, TuningRecord | Failure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A record, and what the same config does now: a record of today, or why there is none."""

    record: TuningRecord
    now: TuningRecord | Failure

    @property
    def slower(self) -> float | None:
        """How much slower than the record says, e.g. 0.1; relative to the reference kernel where both races had one."""
        if isinstance(self.now, Failure) or self.record.measurement is None or self.now.measurement is None:
            return None
        was, now = self.record.measurement, self.now.measurement
        same = [each.impl for each in self.record.baselines] == [each.impl for each in self.now.baselines]
        if same and self.record.baselines and was.reference_ratio and now.reference_ratio:
            return now.reference_ratio / was.reference_ratio - 1
        return now.median_ms / was.median_ms - 1

    @property
    def is_kept(self) -> bool:
        """Whether the kernel works and is about as fast as its record says."""
        return self.slower is not None and self.slower <= BROKEN_PROMISE


def boldest(records: Iterable[TuningRecord], most: int | None) -> list[TuningRecord]:
    """The measured records that claim the most against the reference kernel of their round, at most `most` of them."""
    found = [record for record in records if record.measurement is not None]

    def claim(record: TuningRecord) -> tuple[float, str]:
        ratio = record.measurement.reference_ratio if record.measurement else None
        return (ratio or 0.0, record.workload.key)  # one without a reference is checked first

    return sorted(found, key=claim)[:most]


def race(executor: Executor, workload: Workload, configs: Sequence[Config]) -> Raced:
    """Time configs of one workload against each other and torch's attention, as the last race of a search does.

    The first one is the champion of several, and each has the confidence that no other one is faster by 2%; one alone
    has as many rounds as a search's usual last race, and no confidence.
    """
    info = executor.describe()
    job = RaceJob(workload=workload, configs=tuple(configs), baselines=True, hard=True)
    if len(configs) > 1:
        finals = Finals()
        job = replace(job, rounds=finals.rounds, rule=Rule(champion=0, limit_s=finals.limit_s))
    result = executor.race(job)
    outcomes = {
        config: believed(workload, info.device, outcome)
        for config, outcome in zip(job.configs, result.outcomes, strict=True)
    }
    timed = {config: outcome for config, outcome in outcomes.items() if isinstance(outcome, Measurement)}
    return {
        config: outcome
        if isinstance(outcome, Failure)
        else TuningRecord(
            workload=workload,
            device=info.device,
            config=config,
            provenance="measured",
            measurement=replace(outcome, confidence=confidence(timed, config) if len(timed) > 1 else None),
            source_digest=source_digest(workload, config),
            versions=info.versions,
            limits=Limits.of(info.state),
            baselines=result.baselines,
            created=timestamp(),
        )
        for config, outcome in outcomes.items()
    }


def checks(executor: Executor, records: Iterable[TuningRecord], on_check: Callable[[Check], None]) -> list[Check]:
    """Measure each record of this GPU's identity again; `on_check` hears of each when it is done."""
    device = executor.describe().device
    done = []
    for record in records:
        if device.may_use(record.device):
            (now,) = race(executor, record.workload, [record.config]).values()
            done.append(Check(record=record, now=now))
            on_check(done[-1])
    return done


def decided(executor: Executor, pair: Pair) -> Pair:
    """A pair of measured records of this GPU's identity after a race: the first wins unless it is beaten.

    The record that is taken is the one of today; a pair of another device, or of one config, stays as it is.
    """
    first, second = pair.first, pair.second
    if first is None or second is None or pair.verdict == "same" or pair.either.provenance != "measured":
        return pair
    if pair.either.device.identity != executor.describe().device.identity or first.config == second.config:
        return pair
    raced = race(executor, first.workload, (first.config, second.config))
    one, other = raced[first.config], raced[second.config]
    if isinstance(one, Failure) and isinstance(other, Failure):
        return replace(pair, verdict="undecided", reason=f"neither runs here: {one}")
    if isinstance(one, Failure):
        return replace(pair, second=_as_today(other), verdict="second", reason=f"the first does not run here: {one}")
    if isinstance(other, Failure):
        return replace(pair, first=one, verdict="first", reason=f"the second does not run here: {other}")
    if one.measurement and other.measurement and _is_beaten(one.measurement, other.measurement):
        return replace(pair, first=one, second=other, verdict="second", reason="faster in a race on this GPU")
    return replace(pair, first=one, second=other, verdict="first", reason="not beaten in a race on this GPU")


def _is_beaten(one: Measurement, other: Measurement) -> bool:
    times = round_times({0: one, 1: other})
    return beats(times[1], times[0])


def _as_today(found: TuningRecord | Failure) -> TuningRecord | None:
    return found if isinstance(found, TuningRecord) else None
