"""A record has an origin, and records that were replaced are kept.

Revision: 0006. Reason: a search, an import or a merge that replaced a record left no trace of it, and nobody could tell
who had made a record, with which seed and budget, and what it had beaten. Old records have no origin: nothing is known.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Both tables are new, and empty."""
    op.create_table(
        "origins",
        *_integers("id", "record_id"),
        *_strings("run", "host"),
        sa.Column("seed", sa.Integer(), nullable=True),
        *_strings("budget", "runners_up"),
        sa.PrimaryKeyConstraint("id", name="pk_origins"),
        sa.UniqueConstraint("record_id", name="uq_origins_record_id"),
        sa.ForeignKeyConstraint(["record_id"], ["records.id"], name="fk_origins_record_id", ondelete="CASCADE"),
    )
    op.create_table(
        "history",
        *_integers("id", "workload_id", "device_id"),
        *_strings("provenance", "family", "knobs"),
        sa.Column("times_ms", sa.String(), nullable=True),
        *_floats("max_error", "mean_error", "reference_ms", "sm_clock_mhz", "predicted_ms"),
        *_strings("source_digest", "flashgen_version", "triton_version", "torch_version", "driver_version", "created"),
        sa.Column("hard_times_ms", sa.String(), nullable=True),
        *_strings("anchors", "run", "host"),
        sa.Column("seed", sa.Integer(), nullable=True),
        *_strings("budget", "runners_up", "moment", "reason", "source"),
        sa.PrimaryKeyConstraint("id", name="pk_history"),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name="fk_history_workload_id"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_history_device_id"),
    )
    op.create_index("ix_history_workload_id", "history", ["workload_id"])


def downgrade() -> None:
    """An older flashgen never read them."""
    op.drop_index("ix_history_workload_id", "history")
    op.drop_table("history")
    op.drop_table("origins")


def _integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def _strings(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]


def _floats(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Float(), nullable=True) for name in names]
