"""`Quiet`: around calls of Optuna, whose log lines and notices are not for the users of a tuner."""

from __future__ import annotations

import threading
from typing import Any

import optuna


class Quiet:
    """Optuna says nothing inside, not even about its own experimental parts.

    Its verbosity is that of the process: the first of several searches at a time sets it, the last one resets it.
    """

    _lock = threading.Lock()
    _inside = 0
    _verbosity = 0

    def __enter__(self) -> None:
        with Quiet._lock:
            if not Quiet._inside:
                Quiet._verbosity = optuna.logging.get_verbosity()
                optuna.logging.set_verbosity(optuna.logging.ERROR)
            Quiet._inside += 1

    def __exit__(self, *error: Any) -> None:
        with Quiet._lock:
            Quiet._inside -= 1
            if not Quiet._inside:
                optuna.logging.set_verbosity(Quiet._verbosity)
