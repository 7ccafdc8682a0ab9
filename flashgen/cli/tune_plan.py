"""What `flashgen tune` would do: `--dry-run` and `--list-models`."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from flashgen.cli import output
from flashgen.core.device import Device
from flashgen.core.quoting import plural

if TYPE_CHECKING:
    from flashgen.tuning.request import Request


def print_plan(request: Request, *, as_json: bool) -> None:
    """Print what would be done; nothing is compiled, measured or written."""
    from flashgen.cli.display import duration
    from flashgen.db.files import is_unmade
    from flashgen.db.store import Store
    from flashgen.measure.gpu import versions
    from flashgen.tuning.plan import plan

    with contextlib.ExitStack() as stack:
        is_new = is_unmade(request.database)
        rows = plan(
            request.workloads,
            device=_device_to_plan(request),
            store=None if is_new else stack.enter_context(Store.open(request.database, read_only=True)),
            budget=request.budget,
            measured=request.target is None,
            jobs=request.jobs,
            options=request.options,
            versions=versions(),
        )
    for note in request.notes:
        output.note(note)
    total_s = min(sum(row.expected_s for row in rows), math.inf if request.limit_s is None else request.limit_s)
    if as_json:
        entries = [
            {
                "workload": row.workload.key,
                "status": row.status,
                "candidates": row.candidates,
                "stored_trials": row.stored_trials,
                "expected_s": row.expected_s,
                "reason": row.reason,
            }
            for row in rows
        ]
        output.print_json({"workloads": entries, "expected_s": total_s})
        return
    output.print_table(
        ("workload", "would", "candidates", "tried before", "expected", "reason"),
        [
            (r.workload.key, r.status, r.candidates, r.stored_trials, duration(r.expected_s), r.reason or None)
            for r in rows
        ],
    )
    output.say(f"{plural(len(rows), 'workload')}, budget {request.budget} each, about {duration(total_s)} in all")


def print_models(*, as_json: bool) -> None:
    """Print the presets that ship with flashgen."""
    from flashgen.tuning.workloads import presets

    if not as_json:
        columns = ("model", "pass", "workloads", "what")
        output.print_table(columns, [(p.name, p.direction, len(p.workloads), p.title) for p in presets()])
        return
    listed = {}
    for p in presets():
        facts = {"title": p.title, "source": p.source, "direction": p.direction}
        listed[p.name] = {**facts, "workloads": [workload.key for workload in p.workloads]}
    output.print_json(listed)


def _device_to_plan(request: Request) -> Device:
    from flashgen.launch.gpu import current_device

    return request.target or current_device(request.index)
