"""`flashgen tune --ray`: the same run on all GPUs of a cluster, one database for each kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flashgen.cli import output

if TYPE_CHECKING:
    from flashgen.cli.tune import Shown
    from flashgen.tuning.events import Event, RunFinished, RunStarted


def run_on_cluster(run: Shown, address: str) -> tuple[RunFinished, ...]:
    """Tune on the cluster at `address`, show it, and print the closing tables.

    Raises:
        MeasureError: there is no such cluster, or it cannot measure.
        DatabaseError: results cannot be stored.
    """
    from flashgen.cli.display_many import make_display
    from flashgen.tuning import runs
    from flashgen.tuning.events import RunStarted

    begun: list[RunStarted] = []
    with make_display(as_json=run.as_json) as show:

        def on_event(station: str, event: Event) -> None:
            begun.extend([event] if isinstance(event, RunStarted) else [])
            show(station, event)

        finished = runs.run_on_cluster(run.request, address, on_event)
    if not run.as_json:
        _report(run, finished, begun)
    return finished


def _report(run: Shown, finished: Iterable[RunFinished], begun: Sequence[RunStarted]) -> None:
    from flashgen.cli.display import print_report
    from flashgen.cli.tune_calls import print_left
    from flashgen.cli.tune_served import print_served
    from flashgen.tuning.runs import databases

    paths = databases(run.request.database, [each.device for each in finished])
    for each in finished:
        path = paths[each.device.identity]
        print_report(each, each.device, str(path))
        print_left(each, begun)
        print_served(each, each.device, run.target, path)
        output.say("")
