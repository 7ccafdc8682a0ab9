"""`flashgen db`: list, show, import and package tuned records; other `db_*` modules have more."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli import db_compare, db_export, db_history, db_learn, db_trials, output
from flashgen.cli.arguments import DeviceName, Json, Provenance, Shape, named_device, named_provenance, reading
from flashgen.core.errors import DatabaseError
from flashgen.core.feature_words import describe
from flashgen.core.record import (
    Failure,
    Limits,
    Measurement,
    Prediction,
    Trial,
    TuningRecord,
    age,
)
from flashgen.core.workload import Workload

app = typer.Typer(
    help="List, show, export, import, verify, compare and merge tuned records, and tell their history.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command("list", short_help="List every record that can serve.")
def list_(device: DeviceName = None, provenance: Provenance = None, json: Json = False) -> None:
    """List every record that can serve, and the database it comes from."""
    from flashgen.db.layers import Layers

    with Layers.open() as layers:
        found = layers.records(device=named_device(device), provenance=named_provenance(provenance))
    found.sort(key=lambda hit: (hit[0].device.identity, hit[0].workload.key, hit[0].provenance))
    if json:
        output.print_json([{**record_json(record), "layer": layer} for record, layer in found])
    elif found:
        columns = ("workload", "device", "ms", "TFLOP/s", "best other", "provenance", "age", "layer")
        output.print_table(columns, [_row(*hit) for hit in found])
    else:
        output.say("no records")


@app.command(short_help="Show all that is known of a workload.")
def show(shape: Shape, device: DeviceName = None, json: Json = False) -> None:
    """Show all that is known of a workload: its records on every device, and what was tried."""
    from flashgen.db.layers import Layers

    with reading():
        workload = Workload.parse(shape)
    wanted = named_device(device)
    with Layers.open() as layers:
        found = [hit for hit in layers.records(device=wanted) if hit[0].workload == workload]
        devices = dict.fromkeys(record.device for record, _ in found)
        tried = {device.identity: layers.tried(workload, device) for device in devices}
    if not found:
        raise DatabaseError(f"a workload to show must have a record; {workload.key} has none (flashgen db list)")
    if json:
        output.print_json([{**record_json(record), "layer": layer} for record, layer in found])
        return
    for number, (record, layer) in enumerate(found):
        if number:
            output.say("")
        trials, predictions = tried[record.device.identity]
        counts: list[tuple[str, output.Cell]] = [("layer", layer), ("trials", _count(trials))]
        if predictions:
            counts.append(("ranked", f"{_count(predictions)} without a GPU"))
        output.print_fields([*_fields(record), *counts])


# here and not with the others below: help lists commands in this order
app.command(short_help="Write records to a file that can be given away.")(db_export.export)


@app.command("import", short_help="Take over the records of a file, or none of them.")
def import_(
    path: Annotated[Path, typer.Argument(help="A file that `flashgen db export` wrote.")],
    with_binaries: Annotated[
        bool,
        typer.Option(
            "--with-binaries",
            help="Take over the kernels beside it, or a bundle that is named: machine code of a maker that you trust.",
        ),
    ] = False,
) -> None:
    """Take over the records of a file: all are valid, or none is taken. Of two records the better one stays.

    Better is one of a kernel that this flashgen still generates, and then the faster one.
    """
    from flashgen.cli.bundles import SUFFIX, import_kernels

    if path.suffix == SUFFIX and not with_binaries:
        raise DatabaseError(f"a bundle of compiled kernels is imported with --with-binaries, got {path}")
    if with_binaries:
        if path.suffix != SUFFIX:
            from flashgen.db.exchange import importable

            importable(path)
        import_kernels(path)  # first: a bundle that is refused leaves no records without it
    if path.suffix != SUFFIX:
        _import_records(path)


def _import_records(path: Path) -> None:
    from flashgen.db.exchange import import_records, importable
    from flashgen.db.layers import Layers, is_absent
    from flashgen.tuning.history import is_current

    with Layers.open() as layers:
        if is_absent(Path(layers.first_name)):
            importable(path)  # a file that is refused makes no empty database
        merged = import_records(layers.writable, path, is_current)
        name = layers.first_name
    output.say(f"{merged.added} added, {merged.replaced} replaced, {merged.kept} kept as they were in {name}")


@app.command(short_help="Write an installable project of a database.")
def package(
    name: Annotated[str, typer.Argument(help="A name for the records, e.g. h100_models.", metavar="NAME")],
    path: Annotated[Path, typer.Argument(help="The database to give away.")],
    target: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new folder. Default: flashgen-records-NAME.")
    ] = None,
    version: Annotated[str, typer.Option("--version", help="The version of the project.")] = "1.0.0",
) -> None:
    """Write an installable project of a database: wherever it is installed, its records serve."""
    from flashgen.db.package_project import write_project

    folder = write_project(name, path, target, version=version)
    output.say(f"written to {folder}; build it with: python -m build {folder}")


app.command(short_help="List the records that a workload has and had.")(db_history.history)
app.command(short_help="List what searches tried.")(db_trials.trials)
app.command(short_help="Forget what need not be kept.")(db_history.prune)
app.command(short_help="Read every page and row; --retime measures again.")(db_compare.verify)
app.command(short_help="Compare what two databases know.")(db_compare.diff)
app.command(short_help="Write the records of two databases to a new one.")(db_compare.merge)
app.command(short_help="Learn seed lists and fallback rules; for maintainers.")(db_learn.learn)


def _row(record: TuningRecord, layer: str) -> tuple[output.Cell, ...]:
    other = record.best_baseline
    beside = f"{other.impl} {other.median_ms / record.time_ms:.2f}x" if other and record.time_ms else None
    created = age(record.created) or None
    workload = record.workload.key
    return workload, record.device.name, record.time_ms, record.tflops, beside, record.provenance, created, layer


def _fields(record: TuningRecord) -> list[tuple[str, output.Cell]]:
    measured, versions = record.measurement, record.versions
    since = age(record.created)
    fields: list[tuple[str, output.Cell]] = [
        ("workload", record.workload.key),
        ("features", describe(record.workload)),
        ("device", f"{record.device.name} ({record.device.identity})"),
        ("config", str(record.config)),
        (record.provenance, f"{output.text(record.time_ms)} ms, {_rate(record)}"),
    ]
    if measured is not None:
        times = ", ".join(output.text(time) for time in measured.times_ms)
        fields += [
            ("windows", f"{times} ms (spread {measured.spread:.1%})"),
            *_other_times(record),
            ("errors", f"max {measured.max_error:.3g}, mean {measured.mean_error:.3g}"),
            ("reference", f"{output.text(measured.reference_ms)} ms of the same race"),
            ("SM clock", f"{output.text(measured.sm_clock_mhz)} MHz"),
            ("confidence", _sure(measured)),
        ]
    fields += [
        (f"beside it: {baseline.impl}", f"{output.text(baseline.median_ms)} ms") for baseline in record.baselines
    ]
    names = ("flashgen", "triton", "torch", "driver")
    fields += [
        ("versions", ", ".join(f"{name} {getattr(versions, name) or 'unknown'}" for name in names)),
        ("limits", _limits(record.limits)),
        ("source", record.source_digest or None),
        ("made", f"{record.created} ({since} ago)" if since else None),
    ]
    return fields


def _sure(measured: Measurement) -> str | None:
    if measured.verdict is None:
        return None
    asked = "that no rival of the last race is faster by 2%"
    return f"{measured.verdict} {asked}" if measured.is_decided else f"{measured.verdict}: not sure {asked}"


def _limits(limits: Limits) -> str | None:
    known = [(limits.power_limit_w, "W"), (limits.max_sm_clock_mhz, "MHz at most")]
    return ", ".join(f"{value:g} {unit}" for value, unit in known if value is not None) or None


def _rate(record: TuningRecord) -> str:
    if record.workload.is_decode:
        return f"{output.text(record.gbps)} GB/s of keys and values"
    return f"{output.text(record.tflops)} TFLOP/s"


def _other_times(record: TuningRecord) -> list[tuple[str, output.Cell]]:
    """What it took on hard data, or decoding and packed sequences on other profiles of lengths."""
    if not record.workload.has_profiles or record.measurement is None:
        return [("on hard data", _hard_time(record))]
    return [(f"on {profile}", f"{output.text(ms)} ms") for profile, ms in record.measurement.profile_ms.items()]


def _hard_time(record: TuningRecord) -> str | None:
    """The time on data that is hard for kernels whose time depends on it, and how that compares."""
    if record.hard_ms is None or record.time_ms is None:
        return None
    return f"{output.text(record.hard_ms)} ms, {record.hard_ms / record.time_ms:.2f} of that on normal data"


def _count(tried: list[Trial] | list[Prediction]) -> str:
    """How many, and how many of them failed in which stage."""
    failures = Counter(each.outcome.stage for each in tried if isinstance(each.outcome, Failure))
    failed = ", ".join(f"{count} failed in {stage}" for stage, count in failures.most_common())
    return f"{len(tried)}{f' ({failed})' if failed else ''}"


def record_json(record: TuningRecord) -> dict[str, object]:
    """A record as `--json` prints it."""
    measured, versions = record.measurement, record.versions
    return {
        "workload": record.workload.key,
        "device": record.device.name,
        "device_identity": record.device.identity,
        "provenance": record.provenance,
        "family": record.config.family,
        "knobs": dict(record.config.knobs),
        "time_ms": record.time_ms,
        "tflops": record.tflops,
        "times_ms": list(measured.times_ms) if measured else [],
        "hard_ms": record.hard_ms,
        "hard_times_ms": list(measured.hard_times_ms) if measured else [],
        "profile_times_ms": {name: list(times_ms) for name, times_ms in measured.profile_times_ms} if measured else {},
        "max_error": measured.max_error if measured else None,
        "mean_error": measured.mean_error if measured else None,
        "reference_ms": measured.reference_ms if measured else None,
        "sm_clock_mhz": measured.sm_clock_mhz if measured else None,
        "confidence": measured.confidence if measured else None,
        "decided": measured.is_decided if measured else None,
        **asdict(record.limits),
        "anchors": {baseline.impl: baseline.median_ms for baseline in record.baselines},
        "source_digest": record.source_digest,
        "versions": {name: getattr(versions, name) for name in ("flashgen", "triton", "torch", "driver")},
        "created": record.created,
    }
