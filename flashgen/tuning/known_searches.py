"""The searches that a cost model learns from: tables that ship with flashgen, and trials of the databases in use."""

from __future__ import annotations

import warnings
from pathlib import Path

from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import printable
from flashgen.core.search_log import SearchLog
from flashgen.core.settings import shipped
from flashgen.db.layers import Layers
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.tuning.learned_cost import LearnedCost, is_installed


def learned_from(layers: Layers) -> LearnedCost | None:
    """What all searches of the layers and the shipped tables teach; None where scikit-learn is not installed."""
    if not is_installed():
        return None
    return LearnedCost([*shipped_tables(), *(log for log, _ in layers.searches())])


def shipped_tables() -> list[SearchLog]:
    """The tables of all devices; one that cannot be read is left out with a warning."""
    paths = sorted(shipped("tuning_db").glob(f"*/replays/*{SUFFIX}"))
    return [log for log in map(_read, paths) if log is not None]


def _read(path: Path) -> SearchLog | None:
    try:
        return read_log(path)
    except DatabaseError as error:
        warnings.warn(printable(f"nothing is learned from a table: {error}", lines=True), stacklevel=4)
        return None
