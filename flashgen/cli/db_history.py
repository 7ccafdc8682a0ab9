"""`flashgen db history` and `flashgen db prune`: what records took the place of, and forgetting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import output
from flashgen.cli.arguments import CommandLineError, DeviceName, Json, Shape, named_device, reading
from flashgen.core.errors import DatabaseError
from flashgen.core.history import Origin, Replaced, RunnerUp
from flashgen.core.quoting import plural
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Workload

if TYPE_CHECKING:
    from flashgen.db.past import Past

VERSIONS = ("flashgen", "triton", "torch", "driver")


def history(shape: Shape, device: DeviceName = None, json: Json = False) -> None:
    """List the records that a workload has and had: who made them, what they beat, when and why they were replaced."""
    from flashgen.db.layers import Layers

    with reading():
        workload = Workload.parse(shape)
    with Layers.open() as layers:
        found = layers.past(workload, named_device(device))
    if not found:
        raise DatabaseError(f"a workload with a history must have a record; {workload.key} has none (flashgen db list)")
    if json:
        output.print_json([entry for past, layer in found for entry in _entries(past, layer)])
        return
    columns = ("made", "device", "provenance", "ms", "replaced", "why", "by", "layer", *DETAILS)
    output.print_table(columns, [row for past, layer in found for row in _rows(past, layer)])


def prune(
    past: Annotated[bool, typer.Option("--history", help="Forget replaced records.")] = False,
    keep: Annotated[
        int, typer.Option("--keep", help="But the last N of each workload, device and provenance.", metavar="N", min=0)
    ] = 0,
) -> None:
    """Forget what need not be kept, in the database that is written to. Records themselves always stay."""
    if not past:
        raise CommandLineError("what is to be forgotten must be named: --history")
    from flashgen.db.layers import Layers, is_absent

    with Layers.open() as layers:
        # one that is not there has nothing to forget, and opening it to write would make it
        count = 0 if is_absent(Path(layers.first_name)) else layers.writable.prune_history(keep)
        output.say(f"{plural(count, 'replaced record')} forgotten in {layers.first_name}")


DETAILS = ("config", "run", "host", "seed", "budget", "runners-up", "versions")


def _rows(past: Past, layer: str) -> list[tuple[output.Cell, ...]]:
    now = [(*_facts(record), None, None, None, layer, *_details(record, origin)) for record, origin in past.records]
    then = [
        (
            *_facts(each.record),
            each.moment,
            each.reason,
            each.source or None,
            layer,
            *_details(each.record, each.origin),
        )
        for each in past.replaced
    ]
    return [*now, *then]


def _facts(record: TuningRecord) -> tuple[output.Cell, ...]:
    return record.created or None, record.device.identity, record.provenance, record.time_ms


def _details(record: TuningRecord, origin: Origin) -> tuple[output.Cell, ...]:
    rivals = _rivals(record, origin)
    named = [f"{name} {getattr(record.versions, name)}" for name in VERSIONS if getattr(record.versions, name)]
    # numbers as texts: a seed of 1234 is not 1,234 of anything
    seed = None if origin.seed is None else str(origin.seed)
    about = (origin.run or None, origin.host or None, seed, origin.budget or None)
    return (str(record.config), *about, rivals, ", ".join(named) or None)


def _rivals(record: TuningRecord, origin: Origin) -> str | None:
    """How many, and how far behind the best of them was by all that the race was decided by."""
    if not origin.runners_up:
        return None
    leads = [lead for rival in origin.runners_up if (lead := _over(rival, record)) is not None]
    return f"{len(origin.runners_up)}, the best {min(leads):.3f}x" if leads else str(len(origin.runners_up))


def _over(rival: RunnerUp, record: TuningRecord) -> float | None:
    return None if record.measurement is None else rival.over(record.measurement)


def _entries(past: Past, layer: str) -> list[dict[str, object]]:
    now = [{**_json(record, origin, layer), "replaced": None} for record, origin in past.records]
    return [*now, *({**_json(each.record, each.origin, layer), "replaced": _end(each)} for each in past.replaced)]


def _end(replaced: Replaced) -> dict[str, object]:
    return {"moment": replaced.moment, "reason": replaced.reason, "source": replaced.source}


def _json(record: TuningRecord, origin: Origin, layer: str) -> dict[str, object]:
    from flashgen.cli.db import record_json

    rivals = [
        {
            "family": rival.config.family,
            "knobs": dict(rival.config.knobs),
            "median_ms": rival.median_ms,
            "times_ms": list(rival.times_ms),
            "hard_times_ms": list(rival.hard_times_ms),
            "profile_times_ms": {name: list(times_ms) for name, times_ms in rival.profile_times_ms},
            "over_winner": _over(rival, record),
        }
        for rival in origin.runners_up
    ]
    made = {"run": origin.run, "host": origin.host, "seed": origin.seed, "budget": origin.budget, "runners_up": rivals}
    return {**record_json(record), "layer": layer, "origin": made}
