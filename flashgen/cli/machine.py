"""`devices`: which GPUs are known, and which of them is here."""

from __future__ import annotations

from dataclasses import asdict

from flashgen.cli import arguments, output
from flashgen.cli.arguments import Json
from flashgen.core.device import CATALOGUE, Device


def devices(json: Json = False) -> None:
    """List the known GPUs; the one of this machine is marked. Any name in the list is a --target."""
    here = arguments.device_here()
    known = [*CATALOGUE]
    if here is not None and here.identity not in {device.identity for device in CATALOGUE}:
        known.append(here)
    if json:
        output.print_json(
            [{**asdict(device), "identity": device.identity, "here": device_is(here, device)} for device in known]
        )
        return
    columns = ("", "name", "identity", "SMs", "memory GB", "smem KB a block", "L2 MB", "GB/s", "bf16 TFLOP/s")
    output.print_table(columns, [_device_row(device, device_is(here, device)) for device in known])
    if here is None:
        output.note("torch sees no GPU here")


def device_is(here: Device | None, device: Device) -> bool:
    """Whether `device` is the GPU of this machine, by its identity."""
    return here is not None and here.identity == device.identity


def _device_row(device: Device, here: bool) -> tuple[output.Cell, ...]:
    return (
        "*" if here else "",
        device.name,
        device.identity,
        device.num_sms,
        device.memory_gb,
        device.smem_per_block // 1024,
        device.l2_bytes // 2**20,
        device.bandwidth_gbs or None,
        device.peak_tflops or None,
    )
