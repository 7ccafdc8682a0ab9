"""A feature that is in the table and nowhere else: every part of the package refuses it."""

from __future__ import annotations

import pytest

from flashgen.core.features import table
from flashgen.core.features.declaration import Feature, Value

TOY = Feature(
    name="toy",
    fields=("head_dim",),  # every workload and every specialization asks for it
    absent="it has no toys",
    values=(Value(name="softcap", default=0.0, chooses_code="is_on"),),
)


def declare_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the row to the table, and do nothing else."""
    monkeypatch.setattr(table, "FEATURES", (*table.FEATURES, TOY))
