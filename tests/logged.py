"""What was logged, in the place of pytest's plugin for it, which `pyproject.toml` leaves out.

The plugin looks through all loggers of a process twice in each phase of a test: torch, transformers and SQLAlchemy have
thousands, which took a fiftieth of the time of the tests.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class Logged(logging.Handler):
    """Keeps the records that reach the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextlib.contextmanager
def at_level(level: int, name: str) -> Iterator[None]:
    """Let a logger say more."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
