"""A workload may ask a backward pass for the same bits every time.

Revision: 0003. Reason: kernels that add up in no fixed order are often the fastest, and must not serve who asked for
determinism; so the two are workloads of their own, with winners of their own. Old rows are of forward passes, which
always give the same bits and never ask for it: false.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """The column says false for every row that is there."""
    op.add_column("workloads", sa.Column("deterministic", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """A row that asked for it keeps that in its key, so that an older flashgen skips it."""
    op.drop_column("workloads", "deterministic")
