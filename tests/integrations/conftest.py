"""Doors without a GPU: what they call is the reference in torch, which has the same signatures."""

from __future__ import annotations

import pytest

import flashgen
from flashgen import reference


@pytest.fixture
def on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in reference.__all__:
        monkeypatch.setattr(flashgen, name, getattr(reference, name))
