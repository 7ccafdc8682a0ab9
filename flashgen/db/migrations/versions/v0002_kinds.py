"""Bias and mask are kinds instead of yes or no.

Revision: 0002. Reason: a bias or a mask with one value for every key, the same for all queries, loads other data and
has other winners than one with a value for every query and key. Old rows meant the latter, and so do their keys.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BEFORE = (
    *("id", "key", "specialization", "direction", "dtype", "batch", "nheads", "nheads_k", "seqlen_q", "seqlen_k"),
    *("head_dim", "head_dim_v", "causal", "window_left", "window_right", "softcap", "alibi", "sink"),
)
AFTER = ("varlen", "page_size")


def upgrade() -> None:
    """0 becomes the empty text and 1 becomes `full`; what else a file held stays, for the checks of a row to refuse."""
    _replace(sa.String(), "CASE {0} WHEN 0 THEN '' WHEN 1 THEN 'full' ELSE {0} END")


def downgrade() -> None:
    """Any kind becomes 1; a row of the kind `keys` keeps that in its key, so that an older flashgen skips it."""
    _replace(sa.Boolean(), "CASE {0} WHEN '' THEN 0 ELSE 1 END")


def _replace(kind: sa.types.TypeEngine[str] | sa.types.TypeEngine[bool], value: str) -> None:
    """SQLite cannot alter a column: the rows wait in a temporary table while the table is made anew."""
    columns = ", ".join([*BEFORE, "bias", "mask", *AFTER])
    values = ", ".join([*BEFORE, value.format("bias"), value.format("mask"), *AFTER])
    op.execute(f"CREATE TEMPORARY TABLE waiting AS SELECT {columns} FROM workloads")
    op.drop_table("workloads")
    op.create_table(
        "workloads",
        *_integers("id"),
        *_strings("key", "specialization", "direction", "dtype"),
        *_integers("batch", "nheads", "nheads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
        *_booleans("causal"),
        sa.Column("window_left", sa.Integer(), nullable=True),
        sa.Column("window_right", sa.Integer(), nullable=True),
        *_booleans("softcap", "alibi", "sink"),
        sa.Column("bias", kind, nullable=False),
        sa.Column("mask", kind, nullable=False),
        *_booleans("varlen"),
        sa.Column("page_size", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_workloads"),
        sa.UniqueConstraint("key", name="uq_workloads_key"),
    )
    op.create_index("ix_workloads_specialization", "workloads", ["specialization"])
    op.execute(f"INSERT INTO workloads ({columns}) SELECT {values} FROM waiting")
    op.execute("DROP TABLE temp.waiting")


def _integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def _strings(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]


def _booleans(*names: str) -> list[sa.Column[bool]]:
    return [sa.Column(name, sa.Boolean(), nullable=False) for name in names]
