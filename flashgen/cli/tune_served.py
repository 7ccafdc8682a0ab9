"""What `flashgen tune` says last: what serves now, and the commands that show it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.cli import output
from flashgen.core.device import Device
from flashgen.core.rungs import MEANINGS, RUNGS
from flashgen.core.settings import settings

if TYPE_CHECKING:
    from flashgen.tuning.events import RunFinished


def print_served(finished: RunFinished, device: Device, target: str | None, database: Path) -> None:
    """What serves the first workload that has a record now, and the commands that show it and its kernel.

    `target` is what the user called the device, None for the one here.
    """
    from flashgen.cli.kernels import explanation_of
    from flashgen.core.workload import Specialization

    found = next((outcome.workload for outcome in finished.outcomes if outcome.record is not None), None)
    if found is None:
        return
    is_usual = database in settings().db_layers
    spec = Specialization.of(found, bias_grad=True)
    why = explanation_of(found, spec, device, None if is_usual else [database])
    rung = why.served.rung
    output.say("")
    output.say(f"{found.key} is now served by rung {rung}, {RUNGS[rung]}: {MEANINGS[rung]}.")
    before = "" if is_usual else f"FLASHGEN_DB={shlex.quote(str(database))} "
    behind = "" if target is None else f" --target {shlex.quote(target)}"
    output.say(f"  why         {before}flashgen explain {found.key}{behind}")
    output.say(f"  its kernel  {before}flashgen render {found.key}{behind}")
