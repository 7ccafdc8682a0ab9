"""The first tables: devices, workloads, records with their anchors, and trials.

Revision: 0001. Reason: a tuned config, how it was measured, and every candidate that was tried must outlive the
process that found them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables in an empty file."""
    _devices()
    _workloads()
    _records()
    _anchors()
    _trials()


def downgrade() -> None:
    """Drop them, the pointing ones first."""
    for table in ("trials", "anchors", "records", "workloads", "devices"):
        op.drop_table(table)


def _devices() -> None:
    op.create_table(
        "devices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("identity", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("arch", sa.String(), nullable=False),
        *_integers("num_sms", "memory_gb", "smem_per_block", "smem_per_sm", "regs_per_sm"),
        *_integers("max_threads_per_sm", "warp_size", "l2_bytes"),
        sa.Column("bandwidth_gbs", sa.Float(), nullable=False),
        sa.Column("peak_tflops", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
        sa.UniqueConstraint("identity", name="uq_devices_identity"),
    )


def _workloads() -> None:
    op.create_table(
        "workloads",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("specialization", sa.String(), nullable=False),
        sa.Column("direction", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        *_integers("batch", "nheads", "nheads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
        *_booleans("causal"),
        sa.Column("window_left", sa.Integer(), nullable=True),
        sa.Column("window_right", sa.Integer(), nullable=True),
        *_booleans("softcap", "alibi", "sink", "bias", "mask", "varlen"),
        sa.Column("page_size", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_workloads"),
        sa.UniqueConstraint("key", name="uq_workloads_key"),
    )
    op.create_index("ix_workloads_specialization", "workloads", ["specialization"])


def _records() -> None:
    op.create_table(
        "records",
        sa.Column("id", sa.Integer(), nullable=False),
        *_integers("workload_id", "device_id"),
        sa.Column("provenance", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("knobs", sa.String(), nullable=False),
        *_outcome(),
        sa.Column("predicted_ms", sa.Float(), nullable=True),
        sa.Column("source_digest", sa.String(), nullable=False),
        sa.Column("flashgen_version", sa.String(), nullable=False),
        sa.Column("triton_version", sa.String(), nullable=False),
        sa.Column("torch_version", sa.String(), nullable=False),
        sa.Column("driver_version", sa.String(), nullable=False),
        sa.Column("created", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_records"),
        sa.UniqueConstraint(
            "workload_id", "device_id", "provenance", name="uq_records_workload_id_device_id_provenance"
        ),
        sa.CheckConstraint("provenance IN ('measured', 'predicted')", name=op.f("ck_records_provenance")),
        sa.CheckConstraint(
            "(provenance = 'measured') = (times_ms IS NOT NULL)", name=op.f("ck_records_measured_has_times")
        ),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name="fk_records_workload_id"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_records_device_id"),
    )


def _anchors() -> None:
    op.create_table(
        "anchors",
        *_integers("id", "record_id"),
        sa.Column("impl", sa.String(), nullable=False),
        sa.Column("median_ms", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_anchors"),
        sa.UniqueConstraint("record_id", "impl", name="uq_anchors_record_id_impl"),
        sa.ForeignKeyConstraint(["record_id"], ["records.id"], name="fk_anchors_record_id", ondelete="CASCADE"),
    )


def _trials() -> None:
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer(), nullable=False),
        *_integers("workload_id", "device_id"),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("knobs", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("stage", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        *_outcome(),
        sa.Column("created", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.UniqueConstraint(
            "workload_id", "device_id", "family", "knobs", name="uq_trials_workload_id_device_id_family_knobs"
        ),
        sa.CheckConstraint("(stage IS NULL) = (times_ms IS NOT NULL)", name=op.f("ck_trials_failed_or_measured")),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name="fk_trials_workload_id"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_trials_device_id"),
    )


def _outcome() -> list[sa.Column[Any]]:
    floats = ("max_error", "mean_error", "reference_ms", "sm_clock_mhz")
    columns: list[sa.Column[Any]] = [sa.Column("times_ms", sa.String(), nullable=True)]
    return columns + [sa.Column(name, sa.Float(), nullable=True) for name in floats]


def _integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def _booleans(*names: str) -> list[sa.Column[bool]]:
    return [sa.Column(name, sa.Boolean(), nullable=False) for name in names]
