"""Other kernel families in the place of those that there are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flashgen.codegen import families
from flashgen.codegen.family import KernelFamily


def use_families(monkeypatch: pytest.MonkeyPatch, rows: Sequence[KernelFamily]) -> None:
    """Have these rows be the families of both passes, in order and by id."""
    monkeypatch.setattr(families, "FAMILIES", tuple(rows))
    monkeypatch.setattr(families, "_BY_ID", {row.id: row for row in (*rows, *families.DECODE_FAMILIES)})
