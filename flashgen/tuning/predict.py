"""An analytic model of tiled kernels: what ranks candidates where nothing can be measured.

A forward pass is one loop (`loops.py` says what a loop costs); a backward pass is one or two, and kernels before and
behind them that do little else than move bytes (`backward_loops.py`). Absolute figures are rough; the ranking is what
it is for.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.codegen import head_packing
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.workload import DTYPE_BYTES, Workload
from flashgen.tuning import backward_tiling, tiling
from flashgen.tuning.backward_loops import streamed_bytes
from flashgen.tuning.backward_tiling import Part
from flashgen.tuning.compile_pool import Compiled, Taken
from flashgen.tuning.loops import Loop, LoopModel
from flashgen.tuning.steps import steps

RANKED_FAMILIES = ("portable_forward", "portable_backward_split", "portable_backward_fused")
"""Families whose candidates the model can tell apart. Of the others it knows the level of their defaults only: their
knobs change the order of instructions, which it does not see."""

LAUNCH_MS = 0.003
PROLOGUE = 3000
"""Cycles of a program outside of its loop: launch, the query tile's load, the division and the store."""

SCORE_OPERATIONS = 5
"""Of a forward pass: scale, maximum, subtract, sum and pack."""


def is_modelled(config: Config) -> bool:
    """Whether the analytic model covers the family of `config`."""
    return tiling.is_modelled(config) or backward_tiling.is_modelled(config)


def predict_ms(workload: Workload, config: Config, device: Device, compiled: Compiled) -> float:
    """Milliseconds that the model expects of `config` on `workload`.

    Args:
        workload: a problem of the pass that the config's family computes.
        config: a config of a modelled family (`is_modelled`).
        device: where it would run; nothing needs to be present.
        compiled: what the kernels take of a multiprocessor, from a compile or from `estimate`.

    Raises:
        TuningError: the family is not modelled, or a kernel does not fit the device.
    """
    if compiled.occupancy < 1:
        raise TuningError(f"a kernel must fit a multiprocessor to be predicted, got {compiled} for {config}")
    if not is_modelled(config):
        known = ", ".join((*tiling.FAMILIES, *backward_tiling.FAMILIES))
        raise TuningError(f"the analytic model covers {known}, got {config.family}")
    if not workload.flops:
        return LAUNCH_MS
    if tiling.is_modelled(config):
        return LAUNCH_MS + LoopModel(_forward_loop(workload, config), workload, device, compiled).ms
    times = [
        _part_ms(part, workload, config, device, compiled.part(f"{config.family}_{part.name}"))
        for part in backward_tiling.parts(config)
    ]
    return sum(times) + _streams_ms(workload, config, device)


def predict_all(workload: Workload, configs: Iterable[Config], device: Device) -> dict[Config, float]:
    """`predict_ms` of many modelled configs before any is compiled; a kernel that several share is predicted once."""
    known: dict[tuple[object, ...], float] = {}

    def part_ms(part: Part, config: Config) -> float:
        values = dict(config.knobs)
        key = (config.family, part.name, *(values[name] for name in part.knobs))
        if key not in known:
            taken = part.taken(workload.specialization, config, device)
            known[key] = _part_ms(part, workload, config, device, taken)
        return known[key]

    times = {}
    for config in configs:
        if backward_tiling.is_modelled(config) and workload.flops:
            looping = sum(part_ms(part, config) for part in backward_tiling.parts(config))
            times[config] = looping + _streams_ms(workload, config, device)
        else:
            times[config] = predict_ms(workload, config, device, estimate(workload, config, device))
    return times


def estimate(workload: Workload, config: Config, device: Device) -> Compiled:
    """About what its kernels take of a multiprocessor, before they are compiled: enough to choose what to compile."""
    if backward_tiling.is_modelled(config):
        return backward_tiling.expected_resources(workload.specialization, config, device)
    return tiling.least_resources(workload.specialization, config, device)


def _part_ms(part: Part, workload: Workload, config: Config, device: Device, taken: Taken) -> float:
    loop = part.loop(workload, part.tile(workload.specialization, config))
    return LAUNCH_MS + LoopModel(loop, workload, device, taken).ms


def _streams_ms(workload: Workload, config: Config, device: Device) -> float:
    """Time of the kernels that only move bytes."""
    moved = streamed_bytes(workload, adds_dq=backward_tiling.adds_dq(config))
    return len(moved) * LAUNCH_MS + (sum(moved) / (device.bandwidth_gbs * 1e6) if device.bandwidth_gbs else 0.0)


def _forward_loop(w: Workload, config: Config) -> Loop:
    tile = tiling.tiling(w.specialization, config)
    columns = tile.query_columns + tile.value_columns
    return Loop(
        rows=tile.block_m,
        columns=tile.block_n,
        steps=steps(w, tile.block_m // tile.packed_heads, tile.block_n),
        heads=head_packing.packs(Sizes.of(w), tile.packed_heads),
        repeats=1,
        head_columns=columns,
        walked_columns=columns,
        owned_columns=tile.query_columns,
        reads=1,
        score_operations=SCORE_OPERATIONS,
        row_operations=w.head_dim_v,  # every step rescales the output
        prologue=PROLOGUE,
        tensor_bytes=w.bytes,
        walked_bytes=w.batch * w.nheads_k * w.seqlen_k * (w.head_dim + w.head_dim_v) * DTYPE_BYTES[w.dtype],
        warps=tile.warps,
        stages=tile.stages,
        pointer_loads=tile.pointer_loads,
        heads_per_group=tile.heads_per_group,
        heavy_first=tile.heavy_first,
        steps_in_flight=tile.steps_in_flight,
    )
