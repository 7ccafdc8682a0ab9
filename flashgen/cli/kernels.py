"""`render`, `compile` and `explain`: which kernel serves a workload, its source, and what it takes of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import arguments, completion, output
from flashgen.cli.arguments import (
    CommandLineError,
    ConfigText,
    Deterministic,
    Family,
    Json,
    Scattered,
    Shape,
    Target,
    Unaligned,
    reading,
)
from flashgen.core.quoting import plural
from flashgen.core.rungs import MEANINGS, RUNGS

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel, CompiledPart
    from flashgen.core.config import Config
    from flashgen.core.device import Device
    from flashgen.core.workload import Specialization, Workload
    from flashgen.runtime.lookup.explanation import Explanation


EXPLAIN_HELP = "\n\n".join(
    [
        "Say which config serves a workload and why: the rung of the ladder, the record, and every family's reason.",
        "The first of these rungs that has a valid config serves:",
        "\b\n" + "\n".join(f"{rung}. {RUNGS[rung]}: {meaning}" for rung, meaning in MEANINGS.items()),
    ]
)


def render(
    shape: Shape,
    target: Target = None,
    config: ConfigText = None,
    family: Family = None,
    deterministic: Deterministic = False,
    unaligned: Unaligned = False,
    scattered: Scattered = False,
) -> None:
    """Print a kernel: of a given config or family, or of the one that would serve the workload.

    The text runs with torch and triton alone. Its launcher refuses a call that it was not compiled for.
    """
    from flashgen.codegen.render import render_standalone

    workload, spec = _parsed(shape, deterministic, unaligned, scattered)
    device, note = arguments.pick_device(target)
    # a complete config gives the same text for every GPU, so only a look-up or a default depends on one
    chosen = _config(workload, spec, device, config, family, shape, check=target is not None)
    if note and config is None:
        output.note(note)
    typer.echo(render_standalone(spec, chosen).text, nl=False)


def compile_(
    shape: Shape,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="A GPU; repeat it for several. Default: the GPU here, else h100.",
            metavar="GPU",
            autocompletion=completion.gpus,
        ),
    ] = None,
    config: ConfigText = None,
    family: Family = None,
    deterministic: Deterministic = False,
    unaligned: Unaligned = False,
    scattered: Scattered = False,
    json: Json = False,
) -> None:
    """Compile a config for any GPU and print what each of its kernels takes: registers, spills, shared memory."""
    from flashgen.codegen.build import compile_kernel

    workload, spec = _parsed(shape, deterministic, unaligned, scattered)
    results = []
    names: list[str | None] = [*target] if target else [None]
    for name in names:
        device, note = arguments.pick_device(name)
        if note:
            output.note(note)
        chosen = _config(workload, spec, device, config, family, shape, check=True)
        results.append((device, chosen, compile_kernel(spec, chosen, device)))
    if json:
        output.print_json([_compiled_json(*result) for result in results])
        return
    for number, result in enumerate(results):
        if number:
            output.say("")
        _print_compiled(*result)


def explain(
    shape: Shape,
    target: Target = None,
    deterministic: Deterministic = False,
    unaligned: Unaligned = False,
    scattered: Scattered = False,
    json: Json = False,
) -> None:
    """Say which config serves a workload and why: the rung of the ladder, the record, and every family's reason."""
    workload, spec = _read(shape, deterministic, unaligned, scattered)
    if workload is None:
        raise CommandLineError(f"explain needs a workload with its sizes, e.g. b4-h32-s4096-d128, got {shape!r}")
    copied = _copied(workload, spec)
    workload, spec = copied or (workload, spec)
    _note_rows(shape, spec, unaligned, scattered)
    device, note = arguments.pick_device(target)
    if note:
        output.note(note)
    explanation = explanation_of(workload, spec, device, copies=copied is not None)
    if json:
        output.print_json(explanation.to_dict())
    else:
        for line in str(explanation).splitlines():
            output.say(line)


def _copied(workload: Workload, spec: Specialization) -> tuple[Workload, Specialization] | None:
    """What serves calls whose tensors are not aligned by aligned copies, where it does."""
    from flashgen.core.input_copies import may_copy, of_copies

    if spec.aligned16 or not may_copy(workload):
        return None
    wider = of_copies(workload)
    return wider, replace(spec, head_dim=wider.head_dim, head_dim_v=wider.head_dim_v, aligned16=True)


def _parsed(
    shape: str, deterministic: bool, unaligned: bool, scattered: bool
) -> tuple[Workload | None, Specialization]:
    """What is asked about, of tensors as they are."""
    workload, spec = _read(shape, deterministic, unaligned, scattered)
    _note_rows(shape, spec, unaligned, scattered)
    return workload, spec


def _read(shape: str, deterministic: bool, unaligned: bool, scattered: bool) -> tuple[Workload | None, Specialization]:
    with reading():
        return arguments.parse_shape(shape, deterministic=deterministic, unaligned=unaligned, scattered=scattered)


def _note_rows(shape: str, spec: Specialization, unaligned: bool, scattered: bool) -> None:
    """Say what of a shape follows from its numbers alone."""
    asked = shape.split("-")
    if not (spec.aligned16 or unaligned or "unaligned" in asked):
        output.note(f"rows of packed tensors are no multiples of 16 bytes, so this is about unaligned ones: {spec.key}")
    if not (spec.aligned_scores or scattered or "scattered" in asked):
        output.note(f"rows of a packed bias or mask are no multiples of 16 bytes, so this is about others: {spec.key}")


def _config(
    workload: Workload | None,
    spec: Specialization,
    device: Device,
    text: str | None,
    family: str | None,
    shape: str,
    *,
    check: bool,
) -> Config:
    """The config that `text` names, a family's default, or what would serve; checked against the device if asked."""
    from flashgen.codegen import families
    from flashgen.core.errors import ConfigError

    if text is not None and family is not None:
        raise CommandLineError("name a --family for its default, or a --config, not both")
    if family is not None:
        with reading():
            families.family(family)
        return arguments.family_default(family, workload, spec, device)
    if text is None:
        if workload is None:
            raise CommandLineError(f"{shape!r} has no sizes to look up: give a workload, a --config or a --family")
        return explanation_of(workload, spec, device).forward.config
    with reading():
        config = arguments.parse_config(text, spec, device)
    reason = families.invalid(config, spec, device)
    if reason is not None and (check or _suits(config, replace(spec, aligned16=True, aligned_scores=True), device)):
        raise ConfigError(f"{config} cannot serve {spec.key} on {device.name}: {reason}")
    return config


def _suits(config: Config, spec: Specialization, device: Device) -> bool:
    """Whether a config can serve: with aligned tensors if not with others, it is the alignment that it lacks."""
    from flashgen.codegen import families

    return families.invalid(config, spec, device) is None


def explanation_of(
    workload: Workload,
    spec: Specialization,
    device: Device,
    databases: Sequence[Path] | None = None,
    *,
    copies: bool = False,
) -> Explanation:
    """Why a workload is served the way it is, with the user's databases or with these in their place.

    Raises:
        UnsupportedError: no family serves it.
    """
    from flashgen.db.layers import Layers
    from flashgen.runtime.lookup.explanation import explain
    from flashgen.runtime.lookup.records import Records

    with Layers.open(databases) as layers:
        return explain(workload, spec, device, Records(layers), copies=copies)


def _print_compiled(device: Device, config: Config, compiled: CompiledKernel) -> None:
    """Fields of the one kernel of a forward pass; a table of the kernels of a backward pass, in their order."""
    head: list[tuple[str, output.Cell]] = [("target", f"{device.name} ({device.arch})"), ("config", str(config))]
    tail: list[tuple[str, output.Cell]] = [
        ("compiled in", f"{compiled.compile_ms:.0f} ms"),
        ("source", f"{compiled.source.entry} {compiled.source.digest}"),
    ]
    if len(compiled.parts) == 1:
        output.print_fields([*head, *_part_fields(device, compiled.main), *tail])
        return
    output.print_fields([*head, *tail])
    columns = ("kernel", "registers", "spills, bytes", "shared memory, bytes", "warps", "blocks an SM", "ms")
    output.print_table(columns, [_part_row(device, part) for part in compiled.parts])


def _part_fields(device: Device, part: CompiledPart) -> list[tuple[str, output.Cell]]:
    blocks = part.occupancy(device)
    threads = blocks * part.num_warps * device.warp_size
    return [
        ("registers", f"{part.registers} a thread"),
        ("spills", f"{part.spills} bytes a thread"),
        ("shared memory", f"{part.shared_bytes} of {device.smem_per_block} bytes a block"),
        ("warps", f"{part.num_warps} a block"),
        ("occupancy", f"{plural(blocks, 'block')} an SM ({threads / device.max_threads_per_sm:.0%} of its threads)"),
    ]


def _part_row(device: Device, part: CompiledPart) -> tuple[output.Cell, ...]:
    taken = (part.registers, part.spills, part.shared_bytes, part.num_warps, part.occupancy(device))
    return (part.kernel.entry, *taken, round(part.compile_ms))


def _compiled_json(device: Device, config: Config, compiled: CompiledKernel) -> dict[str, object]:
    return {
        "target": device.name,
        "arch": device.arch,
        "family": config.family,
        "knobs": dict(config.knobs),
        **_part_json(device, compiled.main),
        "spills_bytes": compiled.spills,
        "compile_ms": compiled.compile_ms,
        "digest": compiled.source.digest,
        "kernels": {part.kernel.entry: _part_json(device, part) for part in compiled.parts},
    }


def _part_json(device: Device, part: CompiledPart) -> dict[str, object]:
    return {
        "registers": part.registers,
        "spills_bytes": part.spills,
        "shared_bytes": part.shared_bytes,
        "num_warps": part.num_warps,
        "blocks_per_sm": part.occupancy(device),
        "compile_ms": part.compile_ms,
    }
