"""Knobs of the Hopper families have the names of the field.

Revision: 0004. Reason: what a knob does should be told by its name to whoever knows FlashAttention-3. Each old value
has one new value, so that a record or a trial of before means the kernel that it meant. Knobs that are no JSON object,
and values that were never declared, stay as they are for the checks of a row to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Value = str | int | bool
Renamed = Mapping[str, tuple[str, Mapping[Value, Value]]]
"""By the old name of a knob: its new one, and the new value of each old one (of those that are not the same)."""

FORWARD: Renamed = {
    "scores_ahead": ("qk_prefetch", {}),
    "maximum": ("softmax_reference", {"first": "first_block"}),
    "max_tree": ("max_chains", {"chain": 1, "chains": 4}),
}
BACKWARD: Renamed = {
    "scores": ("qk_prefetch", {"now": False, "ahead": True}),
    "pace": ("stagger_warpgroups", {"abreast": False, "staggered": True}),
    "starts": ("accumulator_init", {"late": "interleaved", "early": "upfront"}),
}
FAMILIES: Mapping[str, Renamed] = {
    "hopper_forward": FORWARD,
    "hopper_backward_fused": BACKWARD,
    "hopper_backward_split": BACKWARD,
}


def upgrade() -> None:
    """New names and values in every record and trial of these families."""
    _rewrite(FAMILIES)


def downgrade() -> None:
    """The old names and values again."""
    _rewrite({family: _inverse(renamed) for family, renamed in FAMILIES.items()})


def _rewrite(families: Mapping[str, Renamed]) -> None:
    connection = op.get_bind()
    for table in ("records", "trials"):
        query = sa.text(f"SELECT id, family, knobs FROM {table} WHERE family IN :families")
        rows = connection.execute(query.bindparams(sa.bindparam("families", list(families), expanding=True))).all()
        # OR IGNORE: a row that would then equal another one of a file with rows of both kinds stays as it is
        change = sa.text(f"UPDATE OR IGNORE {table} SET knobs = :knobs WHERE id = :id")
        for row_id, family, knobs in rows:
            if (found := renamed_knobs(knobs, families[family])) != knobs:
                connection.execute(change, {"knobs": found, "id": row_id})


def renamed_knobs(knobs: object, renamed: Renamed) -> object:
    """Knobs as a row holds them, under their new names; what is no JSON object of knobs is returned as it is."""
    try:
        found = json.loads(knobs) if isinstance(knobs, str) else None
    except (ValueError, RecursionError):
        return knobs
    if not isinstance(found, dict) or not renamed.keys() & found.keys():
        return knobs
    changed: dict[str, object] = {}
    for name, value in found.items():
        new_name, values = renamed.get(name, (name, {}))
        known = isinstance(value, (str, bool, int)) and value in values
        changed[new_name] = values[value] if known else value
    return json.dumps(dict(sorted(changed.items())), separators=(",", ":"))


def _inverse(renamed: Renamed) -> Renamed:
    return {new: (old, {value: key for key, value in values.items()}) for old, (new, values) in renamed.items()}
