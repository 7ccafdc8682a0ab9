"""`flashgen db export`: records in a file that can be given away, or trials in forms that other tools read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli import completion, db_formats, output
from flashgen.cli.arguments import CommandLineError, DeviceName, Provenance, named_device, named_provenance
from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import plural
from flashgen.core.settings import settings


def export(
    target: Annotated[
        str,
        typer.Argument(
            help="The file to write, whose name ends in .sqlite3; a folder with --format t4 or tables; a storage with "
            "optuna.",
            metavar="PATH",
        ),
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="sqlite: records. t4: trials as Kernel Tuner and the benchmark hub read them. optuna: trials as "
            "studies that optuna-dashboard opens. tables: searches as flashgen db learn reads them, a file each.",
            metavar="FORMAT",
            autocompletion=completion.formats,
        ),
    ] = db_formats.SQLITE,
    run: Annotated[str | None, typer.Option("--run", help="Only trials of the run with this id.", metavar="ID")] = None,
    device: DeviceName = None,
    provenance: Provenance = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Records of all databases, not only of the one that is written to.")
    ] = False,
    history: Annotated[
        bool,
        typer.Option("--history", help="With who made them, on which host, what they beat and what they replaced."),
    ] = False,
    with_binaries: Annotated[
        bool,
        typer.Option(
            "--with-binaries", help="Compile their kernels into a bundle beside it, whose name ends in .kernels."
        ),
    ] = False,
    with_helpers: Annotated[
        bool,
        typer.Option(
            "--with-helpers", help="With the binaries, what append_kv and merge_states launch for such heads."
        ),
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes that compile; all CPUs without.", min=1)] = None,
) -> None:
    """Write records to one file that can be given away, and to a CSV of the same name beside it.

    With --format, write the trials of searches for other tools instead.
    """
    others = {"--provenance": provenance, "--history": history, "--with-binaries": with_binaries}
    db_formats.check_format(format_, {**others, "--with-helpers": with_helpers, "--jobs": jobs})
    if format_ != db_formats.SQLITE:
        named = named_device(device)
        db_formats.export_trials(format_, target, device=named, everything=everything, run=run)
        return
    if run is not None:
        raise CommandLineError(f"--run is about trials (--format t4, optuna or tables), got {run!r}")
    if (with_helpers or jobs) and not with_binaries:
        raise CommandLineError("--with-helpers and --jobs are about the bundle that --with-binaries compiles")
    path = Path(target)
    _refuse_own(path)
    from flashgen.cli.bundles import compile_kernels, write_kernels
    from flashgen.db.exchange import check_target, export_records
    from flashgen.db.layers import Layers
    from flashgen.db.past import exported

    with Layers.open() as layers:
        found = layers.records(device=named_device(device), provenance=named_provenance(provenance))
        chosen = [hit for hit in found if everything or hit[1] == layers.first_name]
        origins, replaced = exported(layers.layers, chosen) if history else ({}, [])
    records = [record for record, _ in chosen]
    if not records:
        raise DatabaseError(f"an export needs records; none of {len(found)} known ones match (--all, flashgen db list)")
    check_target(path, replaced)  # before anything is compiled, and that before anything is written
    kernels = compile_kernels(records, path, jobs, with_helpers=with_helpers) if with_binaries else None
    count = export_records(records, path, origins=origins, replaced=replaced)
    output.say(f"{plural(count, 'record')} written to {path} and {path.with_suffix('.csv')}")
    if kernels is not None:
        write_kernels(kernels, path)


def _refuse_own(path: Path) -> None:
    """An export of some records in place of the file they are from would forget all others, and its history."""
    for own in settings().db_layers:
        with contextlib.suppress(OSError, ValueError):
            if path.samefile(own):
                raise DatabaseError(f"an export is another file than the databases that serve, got {path}")
