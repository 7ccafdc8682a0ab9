"""Databases of the test's own in both places, and a process that has served nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.db import layers
from flashgen.runtime import serve
from tests.runtime.ladders import Ladder


@pytest.fixture
def ladder(tmp_path: Path, own_settings: Path, monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """Empty layers; the user's is the one that settings name."""
    folder = tmp_path / "tuning_db"
    folder.mkdir()
    monkeypatch.setattr(layers, "shipped", lambda name: {"tuning_db": folder}[name])
    return Ladder(user_path=own_settings / "tuning.sqlite3", shipped_folder=folder)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    serve.reload()
    monkeypatch.setattr(serve, "_KERNELS", {})
    yield
    serve.reload()
