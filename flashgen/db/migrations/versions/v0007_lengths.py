"""A workload has a profile of lengths, and a measurement times on several of them.

Revision: 0007. Reason: what a step of decoding takes depends on the lengths of its sequences, which no host knows, so
that one config has to be good on all profiles of them. Old workloads are passes, which have none: the empty text. Old
measurements have no such times: NULL.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TIMED = ("records", "history", "trials")


def upgrade() -> None:
    """Nothing is known of rows that are there."""
    op.add_column("workloads", sa.Column("lengths", sa.String(), nullable=False, server_default=""))
    for table in TIMED:
        op.add_column(table, sa.Column("profile_times_ms", sa.String(), nullable=True))


def downgrade() -> None:
    """An older flashgen knows no decode workloads: it skips their rows."""
    for table in TIMED:
        op.drop_column(table, "profile_times_ms")
    op.drop_column("workloads", "lengths")
