"""An analytic model of tiled kernels: what ranks candidates where nothing can be measured.

`KernelFamily.cost_model` says which loops a config has and which kernels beside them do little else than move bytes;
`loops.py` says what a loop costs. Absolute figures are rough; the ranking is what it is for.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.codegen import families
from flashgen.codegen.common_loops import of_shares
from flashgen.codegen.cost import CostModel, LoopKernel
from flashgen.codegen.family import Sizes
from flashgen.core.compiled import Compiled, Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.workload import Workload
from flashgen.tuning.loops import LoopModel

LAUNCH_MS = 0.003


def cost_model(config: Config) -> CostModel | None:
    """The cost model of a config's family, or None where it has none (or is unknown)."""
    return next((row.cost_model for row in families.FAMILIES if row.id == config.family), None)


def predict_ms(workload: Workload, config: Config, device: Device, compiled: Compiled) -> float:
    """Milliseconds that the model expects of `config` on `workload`.

    Args:
        workload: a problem of the pass that the config's family computes.
        config: a config of a family with a cost model.
        device: where it would run; nothing needs to be present.
        compiled: what the kernels take of an SM, from a compile or from `estimate`.

    Raises:
        TuningError: the family has no cost model, or a kernel does not fit the device.
    """
    if compiled.occupancy < 1:
        raise TuningError(f"a kernel must fit an SM to be predicted, got {compiled} for {config}")
    model = _known(config)
    if not workload.flops:
        return LAUNCH_MS
    looping = (
        _loop_ms(kernel, workload, config, device, compiled.part(kernel.entry(config))) for kernel in model.kernels
    )
    return sum(looping) + _streams_ms(model, workload, config, device)


def predict_all(workload: Workload, configs: Iterable[Config], device: Device) -> dict[Config, float]:
    """`predict_ms` of many configs before any is compiled; a kernel that several share is predicted once.

    Raises:
        TuningError: a family has no cost model.
    """
    known: dict[tuple[object, ...], float] = {}

    def loop_ms(kernel: LoopKernel, config: Config) -> float:
        knobs = config.knobs if kernel.knobs is None else tuple(config.get(name, False) for name in kernel.knobs)
        key = (kernel.entry(config), knobs)
        if key not in known:
            taken = kernel.taken(workload.specialization, config, device)
            known[key] = _loop_ms(kernel, workload, config, device, taken)
        return known[key]

    times = {}
    for config in configs:
        model = _known(config)
        if workload.flops:
            looping = sum(loop_ms(kernel, config) for kernel in model.kernels)
            times[config] = looping + _streams_ms(model, workload, config, device)
        else:
            times[config] = LAUNCH_MS
    return times


def estimate(workload: Workload, config: Config, device: Device) -> Compiled:
    """About what its kernels take of an SM, before they are compiled: enough to choose what to compile.

    Raises:
        TuningError: the family has no cost model.
    """
    kernels = _known(config).kernels
    return Compiled.of({each.entry(config): each.taken(workload.specialization, config, device) for each in kernels})


def _known(config: Config) -> CostModel:
    model = cost_model(config)
    if model is None:
        covered = ", ".join(row.id for row in families.FAMILIES if row.cost_model is not None)
        raise TuningError(f"the analytic model covers {covered}, got {config.family}")
    return model


def _loop_ms(kernel: LoopKernel, workload: Workload, config: Config, device: Device, taken: Taken) -> float:
    dense = workload.as_dense  # of packed sequences it is told the rows, and not how they are divided
    spec = workload.specialization
    loop = kernel.loop(dense, kernel.tile(spec, config))
    splits = families.family(config.family).key_splits(spec, config, Sizes.of(dense), device)
    launches = LAUNCH_MS * (1 if splits == 1 else 2)
    return launches + LoopModel(of_shares(loop, dense, splits), dense, device, taken).ms


def _streams_ms(model: CostModel, workload: Workload, config: Config, device: Device) -> float:
    """Time of the kernels that only move bytes."""
    moved = model.streamed_bytes(workload.as_dense, config)
    return len(moved) * LAUNCH_MS + (sum(moved) / (device.bandwidth_gbs * 1e6) if device.bandwidth_gbs else 0.0)
