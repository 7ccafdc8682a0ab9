"""What serving logs, with the standard `logging` under the name `flashgen`. A call that was served before logs nothing.

| level | what |
|---|---|
| WARNING | a kind of call has no tuned record and gets a default config, once a device, direction and process |
| INFO | a kernel was compiled while serving, and how long that took |
| DEBUG | which rung of the ladder serves a call that is new to this process, and with which config |

No handler is added: without one of the program's, `logging` itself writes warnings to stderr.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.quoting import printable
from flashgen.core.rungs import RUNGS
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload

if TYPE_CHECKING:
    from flashgen.runtime.lookup.ladder import Served

LOGGER = logging.getLogger("flashgen")

TUNE_SECONDS_PER_WORKLOAD = 30
"""What `flashgen tune` takes for one workload by default, said in the notice of the first call."""

_NOTICED: set[str] = set()


def forget() -> None:
    """Say again what was said once (after `reload`)."""
    _NOTICED.clear()


def served_by(workload: Workload, served: Served) -> None:
    """Log what the ladder answered."""
    LOGGER.debug("%s is served by rung %d, %s: %s", workload.key, served.rung, RUNGS[served.rung], served.config)


def compiled_in(seconds: float, config: Config, spec: Specialization) -> None:
    """Log that a kernel was not ready and had to be compiled."""
    LOGGER.info("compiled %s for %s in %.2f s", config, spec.key, seconds)


def notice(workload: Workload, served: Served, device: Device) -> None:
    """One line, once a device, direction and process, where nothing measured serves."""
    once = f"{device.identity} {workload.direction}"
    if served.record is not None or served.rung == 1 or settings().quiet or once in _NOTICED:
        return
    _NOTICED.add(once)
    is_forward = workload.direction == "forward"
    about, shape = ("", workload.key.removeprefix("fwd-")) if is_forward else (" of a backward pass", workload.key)
    line = (
        f"flashgen: no tuned record{about} for {device.name} ({device.identity}); the default config serves. "
        f"Tune with: flashgen tune --shape {shape}  (about {TUNE_SECONDS_PER_WORKLOAD} s)"
    )
    LOGGER.warning("%s", printable(line))
