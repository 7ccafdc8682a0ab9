"""What a search finds out: `Measurement`, `Failure`, `Baseline`, and `TuningRecord`, the one type a database knows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from flashgen.core.checks import TIMES, are_times
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import MeasureError
from flashgen.core.lengths import ALL_PROFILES
from flashgen.core.quoting import plural
from flashgen.core.workload import Workload

STAGES = ("build", "launch", "verify", "timeout", "memory", "resources")
PROVENANCES = ("measured", "predicted")

DECIDED = 0.5
"""The least confidence of a race that could tell: below it the doubts of its rivals add up to more than a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a candidate has no time: data in a search, an error anywhere else."""

    stage: str
    reason: str

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise MeasureError(f"a failure's stage is one of {', '.join(STAGES)}, got {self.stage!r}")

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one config on one workload, each the mean per call of one window, in milliseconds.

    `reference_ms` is the time of the fixed reference kernel in the same race, because absolute times of different
    races do not compare on a card that changes its clock. Errors are against the float64 oracle.

    `times_ms` are of normal random numbers. `hard_times_ms` has the times of the same rounds on data that is hard for
    kernels whose time depends on it (`measure.data_kinds.hard_kind`), and is empty where none were taken. Of decoding
    and of packed sequences, `times_ms` are of the first of the workload's profiles of lengths, and `profile_times_ms`
    has those of the others.

    `confidence` is how sure the last race was, from 0 to 1, that nobody in it is faster by 2% or more; None where none
    was run, or where nobody wrote it down. It is 1 less the doubts of all rivals (`measure.sequential`), a lower bound:
    below DECIDED it says that the race ended before it could tell, and not that a rival is faster.
    """

    times_ms: tuple[float, ...]
    max_error: float = 0.0
    mean_error: float = 0.0
    reference_ms: float | None = None
    sm_clock_mhz: float | None = None
    hard_times_ms: tuple[float, ...] = ()
    profile_times_ms: tuple[tuple[str, tuple[float, ...]], ...] = ()
    confidence: float | None = None

    def __post_init__(self) -> None:
        if not self.times_ms or not are_times(self.times_ms):
            raise MeasureError(f"a measurement has at least one time, and {TIMES}, got {self.times_ms}")
        if not are_times(self.hard_times_ms):
            raise MeasureError(f"on hard data {TIMES}, got {self.hard_times_ms}")
        if self.reference_ms is not None and not are_times([self.reference_ms]):
            raise MeasureError(f"of a reference kernel {TIMES}, got {self.reference_ms}")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise MeasureError(f"confidence is from 0 to 1, got {self.confidence}")
        if self.hard_times_ms and len(self.hard_times_ms) != len(self.times_ms):
            raise MeasureError(
                f"times on hard data are of the same rounds as {self.times_ms}, got {self.hard_times_ms}"
            )
        for profile, times_ms in self.profile_times_ms:
            if profile not in ALL_PROFILES or not are_times(times_ms):
                raise MeasureError(f"on a profile of lengths {TIMES}, got {profile}: {times_ms}")
            if len(times_ms) != len(self.times_ms):
                raise MeasureError(f"times on {profile} are of the same rounds as {self.times_ms}, got {times_ms}")

    @property
    def is_decided(self) -> bool | None:
        """Whether the last race could tell that nobody in it is faster by 2%; None where that is not known."""
        return None if self.confidence is None else self.confidence >= DECIDED

    @property
    def verdict(self) -> str | None:
        """The confidence in words, e.g. `97.0%` or `undecided, 12 rounds`; None where there is none."""
        if self.confidence is None:
            return None
        return f"{self.confidence:.1%}" if self.is_decided else f"undecided, {len(self.times_ms)} rounds"

    @property
    def median_ms(self) -> float:
        """The median over all windows on normal data."""
        return statistics.median(self.times_ms)

    @property
    def hard_ms(self) -> float | None:
        """The median over all windows on hard data, None where there are none."""
        return statistics.median(self.hard_times_ms) if self.hard_times_ms else None

    @property
    def profile_ms(self) -> dict[str, float]:
        """The medians over all windows on each profile of lengths but the first, by name."""
        return {profile: statistics.median(times_ms) for profile, times_ms in self.profile_times_ms}

    @property
    def balanced(self) -> Measurement:
        """The same with one time for each round, the geometric mean of those on all data; itself if that is one."""
        kinds = (self.hard_times_ms, *(times_ms for _, times_ms in self.profile_times_ms))
        every = [self.times_ms, *(times_ms for times_ms in kinds if times_ms)]
        if len(every) == 1:
            return self
        means = tuple(math.prod(times) ** (1 / len(every)) for times in zip(*every, strict=True))
        return replace(self, times_ms=means, hard_times_ms=(), profile_times_ms=())

    def times(self, factor: float) -> Measurement:
        """The same with all but the reference's times multiplied."""
        if factor == 1.0:
            return self
        return replace(
            self,
            times_ms=tuple(factor * time for time in self.times_ms),
            hard_times_ms=tuple(factor * time for time in self.hard_times_ms),
            profile_times_ms=tuple((name, tuple(factor * t for t in each)) for name, each in self.profile_times_ms),
        )

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over all windows."""
        return (max(self.times_ms) - min(self.times_ms)) / self.median_ms

    @property
    def reference_ratio(self) -> float | None:
        """Median over the reference kernel's time of the same round; comparable between rounds."""
        return self.median_ms / self.reference_ms if self.reference_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The software a record was made with; a part that was not there is an empty string."""

    flashgen: str = ""
    triton: str = ""
    torch: str = ""
    driver: str = ""

    @property
    def released(self) -> Versions:
        """The same without the commit of flashgen, which changes without a change of what is measured."""
        return replace(self, flashgen=self.flashgen.partition("+")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the speed of a card beside its model: its power limit in watts, its highest SM clock in MHz.

    None where nobody asked, or the driver did not say.
    """

    power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None

    @classmethod
    def of(cls, state: Iterable[tuple[str, float]]) -> Limits:
        """Those among what a driver said of a device (`measure.protocol.HostInfo.state`)."""
        known = dict(state)
        return cls(power_limit_w=known.get("power_limit_w"), max_sm_clock_mhz=known.get("sm_clock_max_mhz"))

    def __post_init__(self) -> None:
        for name, value in (("power limit", self.power_limit_w), ("clock", self.max_sm_clock_mhz)):
            if value is not None and not 0 < value < math.inf:
                raise MeasureError(f"a {name} is finite and above 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Time of another implementation on the same workload, measured in the same round as the winner."""

    impl: str
    median_ms: float

    def __post_init__(self) -> None:
        if not are_times([self.median_ms]):
            raise MeasureError(f"of a baseline {TIMES}, got {self.median_ms}")


SPLIT = "split"
"""The name of the baseline of a mixed batch: two launches, its steps of decoding by a decode family and the chunks of
prompts behind them by the config that they are timed beside, where the config of a record takes one launch for all."""

SOURCES = (
    "default",
    "incumbent",
    "neighbour",
    "seed",
    "model",
    "learned",
    "sampler",
    "random",
    "local",
    "finals",
    "varied",
)
"""Who proposes a candidate: the families' defaults, the record that is served today, the nearest other records, a list
of configs that won before, the analytic model, a model that learns from trials, the sampler, chance, the surroundings
of the best, a race that a config failed in, or knobs changed in a record that is timed again. Before schema 0009
`neighbour` was the incumbent, too, and `model` a list or the default of another family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One evaluated candidate of a search: what makes a stopped search resumable, and what searches are judged by.

    Attributes:
        workload: what was searched for.
        device: where it was measured.
        config: the candidate.
        source: one of `SOURCES`.
        outcome: its times, or why it has none.
        created: when that was known, ISO 8601, UTC.
        run: the id of the run; with the workload and the device it names the search (`core.search_log.SearchRun`).
        number: its place in the order of its search, from 1.
        compiled: what the compiler said; None where it refused.
        predicted_ms: what the analytic model expected of it once it was compiled, where it has a model.
        evaluate_s: seconds of building, verifying and timing; None where it was not sent to an executor.
        elapsed_s: seconds from the start of the search until the outcome was known.

    What is not known is empty or None, as all behind `created` of a trial from before schema 0009.
    """

    workload: Workload
    device: Device
    config: Config
    source: str
    outcome: Measurement | Failure
    created: str = ""
    run: str = ""
    number: int | None = None
    compiled: Compiled | None = None
    predicted_ms: float | None = None
    evaluate_s: float | None = None
    elapsed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One candidate ranked without a GPU, by its predicted time in ms: what makes a stopped ranking resumable."""

    workload: Workload
    device: Device
    config: Config
    outcome: float | Failure
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The config to serve for a workload on a device, and how that is known.

    A `measured` record carries a `Measurement`; a `predicted` one carries `predicted_ms` from the analytic model and
    never outranks a measured one. `source_digest` tells whether the template has changed since.
    """

    workload: Workload
    device: Device
    config: Config
    provenance: str
    measurement: Measurement | None = None
    predicted_ms: float | None = None
    source_digest: str = ""
    versions: Versions = field(default_factory=Versions)
    baselines: tuple[Baseline, ...] = ()
    created: str = ""  # ISO 8601, UTC
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            raise MeasureError(f"provenance is one of {', '.join(PROVENANCES)}, got {self.provenance!r}")
        if (self.provenance == "measured") != (self.measurement is not None):
            raise MeasureError(f"a record is measured iff it has a measurement, got {self.provenance!r}")

    @property
    def identity(self) -> tuple[str, str, str]:
        """Device identity, workload and provenance, of which a database holds one record; their order is that of lists.

        Measured ones come before predicted ones.
        """
        return self.device.identity, self.workload.key, self.provenance

    @property
    def time_ms(self) -> float | None:
        """The measured median, else the predicted time, else None."""
        return self.measurement.median_ms if self.measurement else self.predicted_ms

    @property
    def hard_ms(self) -> float | None:
        """The measured median on hard data, None where none was measured."""
        return self.measurement.hard_ms if self.measurement else None

    @property
    def tflops(self) -> float | None:
        """Achieved (or predicted) 1e12 floating-point operations per second."""
        return self.workload.flops / self.time_ms / 1e9 if self.time_ms else None

    @property
    def gbps(self) -> float | None:
        """Achieved 1e9 bytes of keys and values per second, each counted once."""
        return self.workload.cache_bytes / self.time_ms / 1e6 if self.time_ms else None

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest other implementation measured beside it; two launches of flashgen's own are none."""
        others = (baseline for baseline in self.baselines if baseline.impl != SPLIT)
        return min(others, key=lambda baseline: baseline.median_ms, default=None)


def moment(created: str) -> datetime:
    """The time that an ISO 8601 text names; an empty one is before all others, one without a zone is UTC.

    Raises:
        ValueError: the text names none.
    """
    if not created:
        return datetime.min.replace(tzinfo=timezone.utc)
    found = datetime.fromisoformat(created.replace("Z", "+00:00"))  # Python 3.10 does not read the Z
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def timestamp() -> str:
    """Now, as ISO 8601 in UTC with microseconds: trials are often less than a second apart."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def age(created: str, now: datetime | None = None) -> str:
    """How long ago an ISO 8601 time was, e.g. `3 days`; empty for no time."""
    if not created:
        return ""
    seconds = max(((now or datetime.now(timezone.utc)) - moment(created)).total_seconds(), 0.0)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return plural(seconds // length, unit)
    return "moments"
