"""Records of packed sequences, in fp32: the portable families serve these on every GPU."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families import default_config
from flashgen.core.config import Config
from flashgen.core.record import Measurement, TuningRecord
from flashgen.core.workload import Specialization, Workload
from tests.db.samples import H200, MEASURED

BATCH = Workload.parse("fp32-b16-h32-hk8-tq32768-s8192-d128-causal-varlen")
SPEC = BATCH.specialization


def config(stages: int = 2, spec: Specialization = SPEC) -> Config:
    return default_config(spec, H200).replace(num_stages=stages)


def tuned(workload: Workload = BATCH, stages: int = 2, **changes: object) -> TuningRecord:
    """A record whose config is told from the default by its stages."""
    _, *others = [each.lengths for each in workload.profiles] or [""]
    times = Measurement(
        times_ms=(900.0, 910.0), reference_ms=9.0, profile_times_ms=tuple((n, (950.0, 960.0)) for n in others)
    )
    kept = {"workload": workload, "config": config(stages), "baselines": (), "measurement": times, **changes}
    return replace(MEASURED, **kept)  # type: ignore[arg-type]
