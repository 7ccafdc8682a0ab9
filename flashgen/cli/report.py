"""`flashgen report`: a database or a run as one page that a browser opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli import output
from flashgen.cli.arguments import DeviceName, named_device
from flashgen.core.quoting import plural

USUAL = Path("report.html")


def report(
    databases: Annotated[
        list[Path] | None, typer.Argument(help="Files. Default: all databases that serve.", metavar="[DATABASE]...")
    ] = None,
    path: Annotated[Path, typer.Option("--output", "-o", help="The page to write.", metavar="FILE")] = USUAL,
    run: Annotated[str | None, typer.Option("--run", help="Only of the run with this id.", metavar="ID")] = None,
    device: DeviceName = None,
) -> None:
    """Write what databases know to one HTML file: winners, searches, knobs, failures, devices.

    The page is static: it has no scripts and loads nothing, so it can be mailed, archived and opened anywhere.
    """
    from flashgen.report.contents import read
    from flashgen.report.page import write

    everything = read(databases or [])
    contents = everything.of(device=named_device(device, everything.devices), run=run)
    write(contents, path)
    records, searches = len(contents.entries), len(contents.searches)
    output.say(f"{plural(records, 'record')} and {plural(searches, 'search', 'searches')} written to {path}")
