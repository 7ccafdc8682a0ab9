"""A trial knows its search and what was compiled, and searches and the races of their finals are kept.

Revision: 0009. Reason: nobody could tell what a search is worth. A trial had neither its place nor what the compiler
said nor what it cost, the next search of a workload wrote over it, and of the finals the winner's last rivals alone
were kept. So a config is tried once in a run and no longer once for ever. Of old trials nothing more is known: they
have the empty run.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

OLD = (
    *("id", "workload_id", "device_id", "family", "knobs", "source", "stage", "reason", "times_ms", "max_error"),
    *("mean_error", "reference_ms", "sm_clock_mhz", "created", "profile_times_ms"),
)
TRIED = ("workload_id", "device_id", "family", "knobs")


def upgrade() -> None:
    """Both tables of searches are new, and empty."""
    _replace_trials(
        ("workload_id", "device_id", "run", "family", "knobs"),
        sa.Column("run", sa.String(), server_default="", nullable=False),
        *_maybe(sa.Integer(), "number", "registers", "spills", "shared_bytes", "occupancy"),
        *_maybe(sa.Float(), "compile_ms"),
        sa.Column("source_digest", sa.String(), server_default="", nullable=False),
        *_maybe(sa.String(), "parts"),
        *_maybe(sa.Float(), "predicted_ms", "evaluate_s", "elapsed_s"),
    )
    op.create_table(
        "searches",
        *_integers("id", "workload_id", "device_id"),
        *_strings("run", "host"),
        *_maybe(sa.Integer(), "seed"),
        *_strings("budget"),
        *_integers("candidates"),
        *_strings("settings", "flashgen_version", "triton_version", "torch_version", "driver_version"),
        *_strings("state", "created"),
        *_keys("searches", ("workload_id", "device_id", "run")),
    )
    op.create_table(
        "finalists",
        *_integers("id", "workload_id", "device_id"),
        *_strings("run"),
        *_integers("race"),
        *_strings("stage", "family", "knobs"),
        *_maybe(sa.String(), "failed_stage", "reason", "times_ms"),
        *_maybe(sa.Float(), "max_error", "mean_error", "reference_ms", "sm_clock_mhz"),
        *_maybe(sa.String(), "hard_times_ms", "profile_times_ms"),
        *_strings("created"),
        *_keys("finalists", ("workload_id", "device_id", "run", "race", "family", "knobs"), "failed_stage"),
    )


def downgrade() -> None:
    """An older flashgen has the last trial of each config."""
    op.drop_table("finalists")
    op.drop_table("searches")
    op.execute(f"DELETE FROM trials WHERE id NOT IN (SELECT max(id) FROM trials GROUP BY {', '.join(TRIED)})")
    _replace_trials(TRIED)


def _replace_trials(unique: tuple[str, ...], *more: sa.Column[Any]) -> None:
    """SQLite cannot alter a constraint: the rows wait in a temporary table while the table is made anew.

    A row that breaks a rule of the table, in a file that somebody else made, is left out; it would not be read.
    """
    columns = ", ".join(OLD)
    op.execute(f"CREATE TEMPORARY TABLE waiting AS SELECT {columns} FROM trials ORDER BY id")
    op.drop_table("trials")
    op.create_table(
        "trials",
        *_integers("id", "workload_id", "device_id"),
        *_strings("family", "knobs", "source"),
        *_maybe(sa.String(), "stage", "reason", "times_ms"),
        *_maybe(sa.Float(), "max_error", "mean_error", "reference_ms", "sm_clock_mhz"),
        *_strings("created"),
        *_maybe(sa.String(), "profile_times_ms"),
        *more,
        *_keys("trials", unique, "stage"),
    )
    op.execute(f"INSERT OR IGNORE INTO trials ({columns}) SELECT {columns} FROM waiting")
    op.execute("DROP TABLE temp.waiting")


def _keys(table: str, unique: tuple[str, ...], failed: str = "") -> list[sa.Constraint]:
    """The constraints of a table, made in the order of a new file's; `failed` is empty in a row that has times."""
    found: list[sa.Constraint] = [
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
        sa.UniqueConstraint(*unique, name=f"uq_{table}_{'_'.join(unique)}"),
    ]
    if failed:
        rule = f"({failed} IS NULL) = (times_ms IS NOT NULL)"
        found.append(sa.CheckConstraint(rule, name=op.f(f"ck_{table}_failed_or_measured")))
    for column, target in (("workload_id", "workloads.id"), ("device_id", "devices.id")):
        found.append(sa.ForeignKeyConstraint([column], [target], name=f"fk_{table}_{column}"))
    return found


def _integers(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def _strings(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]


def _maybe(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]
