"""`render`, `compile` and `explain`: which kernel serves a workload, its source, and what it takes of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import arguments, output
from flashgen.cli.arguments import ConfigText, Json, Shape, Target
from flashgen.core.errors import WorkloadError

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.core.config import Config
    from flashgen.core.device import Device
    from flashgen.core.workload import Specialization, Workload
    from flashgen.runtime.dispatch import Explanation


def render(shape: Shape, target: Target = None, config: ConfigText = None) -> None:
    """Print a kernel: of a given config, or of the one that would serve the workload.

    The text runs with torch and triton alone.
    """
    from flashgen.codegen.render import render as render_source

    workload, spec = arguments.parse_shape(shape)
    device, note = arguments.pick_device(target)
    # a complete config gives the same text for every GPU, so only a look-up or a default depends on one
    chosen = _config(workload, spec, device, config, shape, check=target is not None)
    if note and config is None:
        output.note(note)
    typer.echo(render_source(spec, chosen).text, nl=False)


def compile_(
    shape: Shape,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", help="A GPU; repeat it for several. Default: the GPU here, else h100."),
    ] = None,
    config: ConfigText = None,
    json: Json = False,
) -> None:
    """Compile a kernel for any GPU and print its registers, spills, shared memory and occupancy."""
    from flashgen.codegen.build import compile_kernel

    workload, spec = arguments.parse_shape(shape)
    results = []
    names: list[str | None] = [*target] if target else [None]
    for name in names:
        device, note = arguments.pick_device(name)
        if note:
            output.note(note)
        chosen = _config(workload, spec, device, config, shape, check=True)
        results.append((device, chosen, compile_kernel(spec, chosen, device)))
    if json:
        output.print_json([_compiled_json(*result) for result in results])
        return
    for number, result in enumerate(results):
        if number:
            typer.echo("")
        output.print_fields(_compiled_fields(*result))


def explain(shape: Shape, target: Target = None, json: Json = False) -> None:
    """Say which config serves a workload and why: the rung of the ladder, the record, and every family's reason."""
    workload, _ = arguments.parse_shape(shape)
    if workload is None:
        raise WorkloadError(f"explain needs a workload with its sizes, e.g. b4-h32-s4096-d128, got {shape!r}")
    device, note = arguments.pick_device(target)
    if note:
        output.note(note)
    explanation = _explanation(workload, device)
    if json:
        output.print_json(explanation.to_dict())
    else:
        typer.echo(str(explanation))


def _config(
    workload: Workload | None, spec: Specialization, device: Device, text: str | None, shape: str, *, check: bool
) -> Config:
    """The config that `text` names, or the one that would serve; checked against the device if asked."""
    from flashgen.codegen.families import why_invalid
    from flashgen.core.errors import ConfigError

    if text is None:
        if workload is None:
            raise WorkloadError(f"{shape!r} has no sizes to look up: give a workload, or a --config")
        return _explanation(workload, device).served.config
    config = arguments.parse_config(text, spec, device)
    reason = why_invalid(config, spec, device) if check else None
    if reason is not None:
        raise ConfigError(f"{config} cannot serve {spec.key} on {device.name}: {reason}")
    return config


def _explanation(workload: Workload, device: Device) -> Explanation:
    from flashgen.db.layers import Layers
    from flashgen.runtime import dispatch

    with Layers.open() as layers:
        return dispatch.explain(workload, workload.specialization, device, dispatch.Records(layers))


def _compiled_fields(device: Device, config: Config, compiled: CompiledKernel) -> list[tuple[str, output.Cell]]:
    blocks = compiled.occupancy(device)
    threads = blocks * compiled.num_warps * device.warp_size
    plural = "" if blocks == 1 else "s"
    return [
        ("target", f"{device.name} ({device.arch})"),
        ("config", str(config)),
        ("registers", f"{compiled.registers} a thread"),
        ("spills", f"{compiled.spills} bytes a thread"),
        ("shared memory", f"{compiled.shared_bytes} of {device.smem_per_block} bytes a block"),
        ("warps", f"{compiled.num_warps} a block"),
        ("occupancy", f"{blocks} block{plural} an SM ({threads / device.max_threads_per_sm:.0%} of its threads)"),
        ("compiled in", f"{compiled.compile_ms:.0f} ms"),
        ("source", f"{compiled.source.entry} {compiled.source.digest}"),
    ]


def _compiled_json(device: Device, config: Config, compiled: CompiledKernel) -> dict[str, object]:
    return {
        "target": device.name,
        "arch": device.arch,
        "family": config.family,
        "knobs": dict(config.knobs),
        "registers": compiled.registers,
        "spills_bytes": compiled.spills,
        "shared_bytes": compiled.shared_bytes,
        "num_warps": compiled.num_warps,
        "blocks_per_sm": compiled.occupancy(device),
        "compile_ms": compiled.compile_ms,
        "digest": compiled.source.digest,
    }
