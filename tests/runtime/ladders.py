"""Records to climb: a user's database over shipped ones, filled by each test."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashgen.codegen.families import FAMILIES, default_config, fitted, validate
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.peak import least_ms
from flashgen.core.record import Baseline, TuningRecord
from flashgen.core.workload import Specialization, Workload
from flashgen.db.exchange import export_records
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.runtime.lookup.ladder import Served, resolve
from flashgen.runtime.lookup.records import Records
from tests.db.samples import H200, MEASURED, PREDICTED

CAUSAL = Workload.parse("b4-h32-hk8-s4096-d128-causal")
NEAR, FAR = CAUSAL.with_shape(seqlen_k=4608, seqlen_q=4608), CAUSAL.with_shape(seqlen_q=128, seqlen_k=128)
UNALIGNED = replace(CAUSAL.specialization, aligned16=False)
PLAIN_GRADIENT = replace(CAUSAL, direction="backward", batch=1, nheads_k=CAUSAL.nheads)
SAME_BITS = replace(PLAIN_GRADIENT, deterministic=True)
TILES = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 0, "heavy_first": False}
SHIPPED = "shipped/some_device"
"""The layer that `Ladder.ship` fills."""


def config(order: int = 8, loads: str = "descriptor") -> Config:
    """A config that every sm90 takes for heads of 128, told from others by its program order."""
    return validate(Config.of("portable_forward", {**TILES, "loads": loads, "heads_per_group": order}))


def measured(workload: Workload = CAUSAL, device: Device = H200, **changes: object) -> TuningRecord:
    kept = {"workload": workload, "device": device, "config": config(), "baselines": (), **changes}
    return _possible(replace(MEASURED, **kept))  # type: ignore[arg-type]


def predicted(workload: Workload = CAUSAL, device: Device = H200, **changes: object) -> TuningRecord:
    kept = {"workload": workload, "device": device, "config": config(), **changes}
    return _possible(replace(PREDICTED, **kept))  # type: ignore[arg-type]


def _possible(record: TuningRecord) -> TuningRecord:
    """The record with times that its device can reach, each as many times as long."""
    times = math.ceil(least_ms(record.workload, record.device))
    measured = record.measurement
    return replace(
        record,
        measurement=measured and replace(measured, times_ms=tuple(times * ms for ms in measured.times_ms)),
        predicted_ms=record.predicted_ms and times * record.predicted_ms,
        baselines=tuple(replace(each, median_ms=times * each.median_ms) for each in record.baselines),
    )


def faster(impl: str, factor: float = 0.5) -> tuple[Baseline, ...]:
    """Another implementation that took `factor` of the time of a sample record (1.25 ms)."""
    return (Baseline(impl=impl, median_ms=1.25 * factor), Baseline(impl="other", median_ms=99.0))


@dataclass
class Ladder:
    """Two layers of records: `shipped/` files below the user's."""

    user_path: Path
    shipped_folder: Path
    shipped: list[TuningRecord] = field(default_factory=list)

    def user(self, *records: TuningRecord) -> None:
        with Store.open(self.user_path) as store:
            for record in records:
                store.put_record(record)

    def ship(self, *records: TuningRecord) -> None:
        self.shipped += records
        export_records(self.shipped, self.shipped_folder / "some_device" / "records.sqlite3")

    def records(self) -> Records:
        return Records(Layers.open([self.user_path]))

    def resolve(
        self,
        workload: Workload = CAUSAL,
        device: Device = H200,
        *,
        spec: Specialization | None = None,
        config: Config | None = None,
    ) -> Served:
        return resolve(workload, spec or workload.specialization, device, self.records(), config=config)


def default(workload: Workload = CAUSAL, device: Device = H200) -> Config:
    spec = workload.specialization
    return fitted(default_config(spec, device), spec, Sizes.of(workload), device)


def of_hopper(workload: Workload, **changes: int | str) -> TuningRecord:
    return measured(workload, config=default().replace(masked_blocks="branch", **changes))


def tuned(workload: Workload, family_id: str, order: int, device: Device = H200) -> TuningRecord:
    """A record of a family's default with another order of programs."""
    row = next(row for row in FAMILIES if row.id == family_id)
    chosen = row.default(workload.specialization, device).replace(heads_per_group=order)
    return measured(workload, device, config=validate(chosen))
