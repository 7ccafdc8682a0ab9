"""The tables of a tuning database, and nothing else.

A column per field; identities and foreign keys are UNIQUE constraints, so that a second row for the same thing cannot
exist. Times are a JSON list of milliseconds, and knobs and times on profiles of lengths a JSON object, because their
length differs from row to row; so are the baselines and runners-up of the history, which nothing asks for on their own.
A change here needs a new revision in `migrations/versions`, a new `SCHEMA_VERSION` in `flashgen.db.layout`, and the
same change in the plain SQL of `flashgen.db.reader`.
"""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import BigInteger, CheckConstraint, Float, ForeignKey, Integer, MetaData, UniqueConstraint, false
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Base(DeclarativeBase):
    """Every constraint has a name, so that a later migration can change it; a float is FLOAT in every SQLAlchemy.

    An integer has 64 bits, as each of SQLite has, also on a server whose INTEGER has 32.
    """

    type_annotation_map: ClassVar = {float: Float(), int: BigInteger().with_variant(Integer(), "sqlite")}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class DeviceRow(Base):
    """A `core.device.Device`; two rows never share an identity."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    identity: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    arch: Mapped[str]
    num_sms: Mapped[int]
    memory_gb: Mapped[int]
    smem_per_block: Mapped[int]
    smem_per_sm: Mapped[int]
    regs_per_sm: Mapped[int]
    max_threads_per_sm: Mapped[int]
    warp_size: Mapped[int]
    l2_bytes: Mapped[int]
    bandwidth_gbs: Mapped[float]
    peak_tflops: Mapped[float]
    power_w: Mapped[int] = mapped_column(server_default="0")


class WorkloadRow(Base):
    """A `core.workload.Workload`, its key, and the key of the class that may share a config."""

    __tablename__ = "workloads"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    specialization: Mapped[str] = mapped_column(index=True)
    direction: Mapped[str]
    dtype: Mapped[str]
    batch: Mapped[int]
    nheads: Mapped[int]
    nheads_k: Mapped[int]
    seqlen_q: Mapped[int]
    seqlen_k: Mapped[int]
    head_dim: Mapped[int]
    head_dim_v: Mapped[int]
    causal: Mapped[bool]
    window_left: Mapped[int | None]
    window_right: Mapped[int | None]
    softcap: Mapped[bool]
    alibi: Mapped[bool]
    sink: Mapped[bool]
    bias: Mapped[str]
    mask: Mapped[str]
    varlen: Mapped[bool]
    page_size: Mapped[int | None]
    deterministic: Mapped[bool] = mapped_column(server_default=false())
    lengths: Mapped[str] = mapped_column(server_default="")
    total_q: Mapped[int | None]
    total_k: Mapped[int | None]


class RecordRow(Base):
    """A `core.record.TuningRecord`: at most one measured and one predicted for a workload on a device."""

    __tablename__ = "records"
    __table_args__ = (
        UniqueConstraint("workload_id", "device_id", "provenance"),
        CheckConstraint("provenance IN ('measured', 'predicted')", name="provenance"),
        CheckConstraint("(provenance = 'measured') = (times_ms IS NOT NULL)", name="measured_has_times"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    provenance: Mapped[str]
    family: Mapped[str]
    knobs: Mapped[str]
    times_ms: Mapped[str | None]
    max_error: Mapped[float | None]
    mean_error: Mapped[float | None]
    reference_ms: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    predicted_ms: Mapped[float | None]
    source_digest: Mapped[str]
    flashgen_version: Mapped[str]
    triton_version: Mapped[str]
    torch_version: Mapped[str]
    driver_version: Mapped[str]
    created: Mapped[str]
    hard_times_ms: Mapped[str | None]
    profile_times_ms: Mapped[str | None]
    confidence: Mapped[float | None]
    power_limit_w: Mapped[float | None]
    max_sm_clock_mhz: Mapped[float | None]

    workload: Mapped[WorkloadRow | None] = relationship()
    device: Mapped[DeviceRow | None] = relationship()
    baselines: Mapped[list[BaselineRow]] = relationship(cascade="all, delete-orphan", order_by="BaselineRow.id")
    origin: Mapped[OriginRow | None] = relationship(cascade="all, delete-orphan")


class BaselineRow(Base):
    """A `core.record.Baseline` of one record."""

    __tablename__ = "anchors"
    __table_args__ = (UniqueConstraint("record_id", "impl"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    record_id: Mapped[int] = mapped_column(ForeignKey("records.id", ondelete="CASCADE"))
    impl: Mapped[str]
    median_ms: Mapped[float]


class OriginRow(Base):
    """The `core.history.Origin` of one record; old records have none. No look-up reads it."""

    __tablename__ = "origins"

    id: Mapped[int] = mapped_column(primary_key=True)
    record_id: Mapped[int] = mapped_column(ForeignKey("records.id", ondelete="CASCADE"), unique=True)
    run: Mapped[str]
    host: Mapped[str]
    seed: Mapped[int | None]
    budget: Mapped[str]
    runners_up: Mapped[str]


class ReplacedRow(Base):
    """A `core.history.Replaced`: the columns of a record as they were, its baselines and origin. No look-up reads it.

    The columns are not checked: a row that breaks a rule of today is replaced, too, and leaves its trace.
    """

    __tablename__ = "history"

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"), index=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    provenance: Mapped[str]
    family: Mapped[str]
    knobs: Mapped[str]
    times_ms: Mapped[str | None]
    max_error: Mapped[float | None]
    mean_error: Mapped[float | None]
    reference_ms: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    predicted_ms: Mapped[float | None]
    source_digest: Mapped[str]
    flashgen_version: Mapped[str]
    triton_version: Mapped[str]
    torch_version: Mapped[str]
    driver_version: Mapped[str]
    created: Mapped[str]
    hard_times_ms: Mapped[str | None]
    anchors: Mapped[str]
    run: Mapped[str]
    host: Mapped[str]
    seed: Mapped[int | None]
    budget: Mapped[str]
    runners_up: Mapped[str]
    moment: Mapped[str]
    reason: Mapped[str]
    source: Mapped[str]
    profile_times_ms: Mapped[str | None]
    confidence: Mapped[float | None]
    power_limit_w: Mapped[float | None]
    max_sm_clock_mhz: Mapped[float | None]

    workload: Mapped[WorkloadRow | None] = relationship()
    device: Mapped[DeviceRow | None] = relationship()


class TrialRow(Base):
    """A `core.record.Trial`: a measurement, or a failure's stage and reason; a run tries a config once.

    A row whose source is `predicted` is a `core.record.Prediction`: its one time is the model's, and it has no run.
    """

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("workload_id", "device_id", "run", "family", "knobs"),
        CheckConstraint("(stage IS NULL) = (times_ms IS NOT NULL)", name="failed_or_measured"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    family: Mapped[str]
    knobs: Mapped[str]
    source: Mapped[str]
    stage: Mapped[str | None]
    reason: Mapped[str | None]
    times_ms: Mapped[str | None]
    max_error: Mapped[float | None]
    mean_error: Mapped[float | None]
    reference_ms: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    created: Mapped[str]
    profile_times_ms: Mapped[str | None]
    run: Mapped[str] = mapped_column(server_default="")
    number: Mapped[int | None]
    registers: Mapped[int | None]
    spills: Mapped[int | None]
    shared_bytes: Mapped[int | None]
    occupancy: Mapped[int | None]
    compile_ms: Mapped[float | None]
    source_digest: Mapped[str] = mapped_column(server_default="")
    parts: Mapped[str | None]
    predicted_ms: Mapped[float | None]
    evaluate_s: Mapped[float | None]
    elapsed_s: Mapped[float | None]

    workload: Mapped[WorkloadRow | None] = relationship()
    device: Mapped[DeviceRow | None] = relationship()


class SearchRow(Base):
    """A `core.search_log.SearchRun`: how the search of a run for a workload was asked for. No look-up reads it."""

    __tablename__ = "searches"
    __table_args__ = (UniqueConstraint("workload_id", "device_id", "run"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    run: Mapped[str]
    host: Mapped[str]
    seed: Mapped[int | None]
    budget: Mapped[str]
    candidates: Mapped[int]
    settings: Mapped[str]
    flashgen_version: Mapped[str]
    triton_version: Mapped[str]
    torch_version: Mapped[str]
    driver_version: Mapped[str]
    state: Mapped[str]
    created: Mapped[str]

    workload: Mapped[WorkloadRow | None] = relationship()
    device: Mapped[DeviceRow | None] = relationship()


class FinalistRow(Base):
    """A `core.search_log.Finalist`: what a config did in a race of the finals. No look-up reads it."""

    __tablename__ = "finalists"
    __table_args__ = (
        UniqueConstraint("workload_id", "device_id", "run", "race", "family", "knobs"),
        CheckConstraint("(failed_stage IS NULL) = (times_ms IS NOT NULL)", name="failed_or_measured"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    run: Mapped[str]
    race: Mapped[int]
    stage: Mapped[str]
    family: Mapped[str]
    knobs: Mapped[str]
    failed_stage: Mapped[str | None]
    reason: Mapped[str | None]
    times_ms: Mapped[str | None]
    max_error: Mapped[float | None]
    mean_error: Mapped[float | None]
    reference_ms: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    hard_times_ms: Mapped[str | None]
    profile_times_ms: Mapped[str | None]
    created: Mapped[str]

    workload: Mapped[WorkloadRow | None] = relationship()
    device: Mapped[DeviceRow | None] = relationship()
