"""The searches that a cost model learns from: tables that ship with flashgen, and trials of the databases in use."""

from __future__ import annotations

import warnings
from pathlib import Path

from flashgen.codegen.families import applicable
from flashgen.core.errors import DatabaseError, UnsupportedError
from flashgen.core.quoting import printable
from flashgen.core.search_log import SearchLog
from flashgen.core.settings import shipped
from flashgen.db.layers import Layers
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.measure.protocol import specialization
from flashgen.tuning.learned_cost import LearnedCost, is_installed


def learned_from(layers: Layers) -> LearnedCost | None:
    """What all searches of the layers and the shipped tables teach; None where scikit-learn is not installed.

    A search that was told to leave out the family that would serve says nothing of how far behind its configs are.
    """
    if not is_installed():
        return None
    return LearnedCost([*shipped_tables(), *(log for log, _ in layers.searches() if _has_usual_family(log))])


def _has_usual_family(log: SearchLog) -> bool:
    """Whether a search was of all families, or of the one whose default serves among others.

    Three searches of 30 trials of a portable family alone made its best config be expected 13% behind a Hopper
    family's, which is 1.8 times as fast.
    """
    names = str(dict(log.search.settings).get("families", "")).split() if log.search else []
    if log.search is None or not names:
        return True
    try:
        usual, *_ = applicable(specialization(log.search.workload), log.search.device)
    except UnsupportedError:
        return True  # nothing is known to be better
    return usual.id in names


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
