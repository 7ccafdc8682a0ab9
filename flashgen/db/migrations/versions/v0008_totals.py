"""A workload of packed sequences has the rows of all of them.

Revision: 0008. Reason: what packed sequences take depends on how many rows they have together, which a host knows, and
not on the bound of their lengths alone. Of old workloads nothing is known, NULL: packed ones are as long as they can
be.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TOTALS = ("total_q", "total_k")


def upgrade() -> None:
    """Nothing is known of rows that are there."""
    for name in TOTALS:
        op.add_column("workloads", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    """An older flashgen does not know the keys of workloads with rows of their own: it skips their rows."""
    for name in reversed(TOTALS):
        op.drop_column("workloads", name)
