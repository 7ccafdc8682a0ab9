"""A record has times on hard data beside those on normal data.

Revision: 0005. Reason: kernels whose time depends on the data looked better than they are, since they were timed on
normal random numbers alone. Old records were, and have no such times: NULL. Trials still are, and have no column.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """The column is empty in every record that is there."""
    op.add_column("records", sa.Column("hard_times_ms", sa.String(), nullable=True))


def downgrade() -> None:
    """An older flashgen never read these times."""
    op.drop_column("records", "hard_times_ms")
