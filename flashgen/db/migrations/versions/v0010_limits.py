"""A record has the confidence of its last race and the limits of its card, and a device the power it is sold with.

Revision: 0010. Reason: nobody could tell how sure a record was of its rivals, nor that a card had another power limit
when it was measured; and cards that are sold under one name with different limits were one device. Of old records
nothing is known, NULL, and old devices have the usual power of their kind, 0. Slices of a card (MIG) were told from
whole ones by their sizes alone and are named now.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

FIGURES = ("confidence", "power_limit_w", "max_sm_clock_mhz")
SLICES = "name LIKE '% MIG %'"


def upgrade() -> None:
    """Nothing is known of rows that are there but the names of slices."""
    op.add_column("devices", sa.Column("power_w", sa.Integer(), server_default="0", nullable=False))
    for table in ("records", "history"):
        for name in FIGURES:
            op.add_column(table, sa.Column(name, sa.Float(), nullable=True))
    op.execute(f"UPDATE devices SET identity = identity || '-mig' WHERE {SLICES}")


def downgrade() -> None:
    """An older flashgen knows no devices of another power: it skips their rows."""
    op.execute(f"UPDATE OR IGNORE devices SET identity = replace(identity, '-mig', '') WHERE {SLICES}")
    for table in ("history", "records"):
        for name in reversed(FIGURES):
            op.drop_column(table, name)
    op.drop_column("devices", "power_w")
