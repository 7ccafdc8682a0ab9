"""Values for the tests of the database: one valid record, and variations of it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families import validate
from flashgen.core.compiled import Compiled, Taken
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.history import Origin, Replaced, RunnerUp
from flashgen.core.record import Baseline, Failure, Measurement, Prediction, Trial, TuningRecord, Versions
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.core.workload import Workload

H200 = find_device("h200")
H100 = find_device("h100")
RTX_4090 = find_device("rtx 4090")
CAUSAL = Workload.parse("b4-h32-hk8-s4096-d128-causal")
SHORT = CAUSAL.with_shape(seqlen_q=512, seqlen_k=512)
WIDE = Workload.parse("b2-h16-s2048-d256")
FIRST_KNOBS: dict[str, int | str | bool] = {
    "block_m": 128,
    "block_n": 128,
    "num_warps": 8,
    "num_stages": 3,
    "loads": "descriptor",
    "maxnreg": 0,
    "heads_per_group": 8,
    "heavy_first": True,
}
OLD_CONFIG = Config.of("portable_forward", FIRST_KNOBS)
CONFIG = validate(OLD_CONFIG)  # with the knobs that came later

MEASURED = TuningRecord(
    workload=CAUSAL,
    device=H200,
    config=CONFIG,
    provenance="measured",
    measurement=Measurement(
        times_ms=(1.25, 1.2, 1.3), max_error=1e-3, mean_error=1e-5, reference_ms=2.5, sm_clock_mhz=1815.0
    ),
    source_digest="0123456789abcdef",
    versions=Versions(flashgen="0.1.0", triton="3.6.0", torch="2.11.0", driver="580.95.05"),
    baselines=(Baseline(impl="sdpa-cudnn", median_ms=1.4), Baseline(impl="sdpa-flash", median_ms=1.9)),
    created="2026-11-20T12:00:00+00:00",
)
DECODE_STEP = Workload.parse("dec-b64-h32-hk8-sk8192-d128-page16")
PROFILE_TIMES = (("ramp", (0.9, 0.8, 0.7)), ("tail", (0.2, 0.1, 0.3)))
"""Of three rounds, as `MEASURED` has."""

HARD_TIMES = (2.5, 2.0, 2.4)
"""Of three rounds, as `MEASURED` has."""

PREDICTED = replace(MEASURED, provenance="predicted", measurement=None, predicted_ms=1.5, baselines=())
TRIAL = Trial(
    workload=CAUSAL,
    device=H200,
    config=CONFIG,
    source="default",
    outcome=Measurement(times_ms=(1.4,), max_error=1e-3, mean_error=1e-5, sm_clock_mhz=1700.0),
    created="2026-11-20T11:00:00+00:00",
)
PREDICTION = Prediction(workload=CAUSAL, device=H200, config=CONFIG, outcome=1.6, created="2026-11-20T10:00:00+00:00")
FAILED = replace(
    TRIAL,
    config=CONFIG.replace(num_warps=16),
    source="sampler",
    outcome=Failure(stage="launch", reason="an illegal memory access\n  in line 7"),
)


SEARCH = SearchRun(
    workload=CAUSAL,
    device=H200,
    run="0123456789abcdef",
    host="gpu-7",
    seed=3,
    budget="20 s",
    candidates=4000,
    settings=(("families", "portable_forward"), ("neighbours", 4), ("retune", True)),
    versions=MEASURED.versions,
    state=(("power_limit_w", 700.0),),
    created="2026-11-20T10:59:00+00:00",
)
KNOWN_TRIAL = replace(
    TRIAL,
    run=SEARCH.run,
    number=2,
    compiled=Compiled.of(
        {"one": Taken(registers=168, spills=0, shared_bytes=98304, occupancy=2)}, compile_ms=900.5, source_digest="ab12"
    ),
    predicted_ms=1.1,
    evaluate_s=0.25,
    elapsed_s=3.5,
)
"""With all that is known of a trial since schema 0009."""

FINALISTS = tuple(
    Finalist(
        workload=CAUSAL,
        device=H200,
        run=SEARCH.run,
        race=race,
        stage=stage,
        config=config,
        outcome=outcome,
        created="2026-11-20T11:30:00+00:00",
    )
    for race, stage, config, outcome in (
        (1, "near", CONFIG, Measurement(times_ms=(1.4, 1.5), hard_times_ms=(2.5, 2.6), reference_ms=2.0)),
        (1, "near", FAILED.config, FAILED.outcome),
        (2, "last", CONFIG, Measurement(times_ms=(1.4,), sm_clock_mhz=1700.0)),
    )
)


def hard(record: TuningRecord, *hard_times_ms: float, **changes: object) -> TuningRecord:
    """`record` with times on hard data."""
    measurement = replace(record.measurement, hard_times_ms=hard_times_ms)  # type: ignore[type-var]
    return replace(record, measurement=measurement, **changes)  # type: ignore[arg-type]


def timed(record: TuningRecord, *times_ms: float, **changes: object) -> TuningRecord:
    """`record` with other times."""
    measurement = replace(record.measurement, times_ms=times_ms)  # type: ignore[type-var]
    return replace(record, measurement=measurement, **changes)  # type: ignore[arg-type]


RIVALS = (
    RunnerUp(config=CONFIG.replace(num_warps=4), times_ms=(1.3, 1.31, 1.35), hard_times_ms=(2.5, 2.1, 2.4)),
    RunnerUp(config=CONFIG.replace(num_stages=2), times_ms=(1.4, 1.41, 1.45)),
)
ORIGIN = Origin(run="0123456789abcdef", host="gpu-7", seed=3, budget="20 s", runners_up=RIVALS)
FORMER = timed(MEASURED, 1.5, created="2026-11-19T12:00:00+00:00")
"""What `MEASURED` took the place of, in `REPLACED`."""

REPLACED = Replaced(
    record=FORMER,
    origin=replace(ORIGIN, run="fedcba9876543210", seed=0),
    moment="2026-11-20T12:00:01+00:00",
    reason="search",
    source="run 0123456789abcdef",
)


def on_profiles(record: TuningRecord) -> TuningRecord:
    """A record of a step of decoding, with times on all profiles of lengths."""
    assert record.measurement is not None
    measured = replace(record.measurement, profile_times_ms=PROFILE_TIMES)
    return replace(record, workload=DECODE_STEP, baselines=(), measurement=measured)
