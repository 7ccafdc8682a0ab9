"""How a config becomes something that runs: kernels that are compiled, and launches of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES, default_config, exact_sibling, most_keys, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DECODE, Specialization, Workload
from flashgen.launch.backward import backward_geometry
from flashgen.launch.decode_plan import DecodePlan
from flashgen.launch.geometry import Geometry
from flashgen.launch.plan import make_backward_plan, make_plan
from flashgen.measure.backward_verification_case import BackwardFactory
from flashgen.measure.decode_case import DecodeFactory
from flashgen.measure.decode_launch import decode_factory
from flashgen.measure.odd_shapes import Factory
from flashgen.measure.protocol import specialization
from flashgen.measure.verify import KernelFactory

KEEP_KERNELS = 128
"""A compiled kernel holds a few MB of text; workloads of one specialization try many of the same."""


class Toolchain(Protocol):
    """How a config becomes something that runs; tests put something simpler in its place."""

    def factory(self, spec: Specialization, config: Config) -> Factory:
        """Build the kernels of a config (a second time it is cheap).

        Returns:
            A `KernelFactory`, or what the specialization of another direction has: a `BackwardFactory` or a
            `DecodeFactory`.

        Raises:
            BuildError: it cannot be built.
        """
        ...

    def is_deterministic(self, config: Config) -> bool:
        """Whether the config's family promises the same bits for equal inputs."""
        ...

    def exact_sibling(self, spec: Specialization, config: Config) -> Config:
        """The config that serves the calls of this one that ask for an LSE: most configs do themselves."""
        ...

    def most_keys(self, config: Config) -> int | None:
        """The keys that a launch of the config has at most; None is any number."""
        ...

    def default(self, workload: Workload) -> Config:
        """The config that serves a workload without any tuning.

        Raises:
            UnsupportedError: there is none.
        """
        ...


class GpuToolchain:
    """Compiles for a GPU of this process, launches through plans, and keeps the kernels that were used last."""

    def __init__(self, device: Device, index: int) -> None:
        self._device = device
        self._index = index
        self._kernels: OrderedDict[tuple[Specialization, Config], CompiledKernel] = OrderedDict()

    def factory(self, spec: Specialization, config: Config) -> Factory:
        """See `Toolchain`."""
        key = (spec, config)
        if key not in self._kernels:
            self._kernels[key] = compile_kernel(spec, config, self._device)
            if len(self._kernels) > KEEP_KERNELS:
                self._kernels.popitem(last=False)
        self._kernels.move_to_end(key)
        return _FACTORIES[spec.direction](self._kernels[key], spec, config, self._index)

    def is_deterministic(self, config: Config) -> bool:
        """See `Toolchain`."""
        return any(row.id == config.family and row.is_deterministic for row in (*FAMILIES, *DECODE_FAMILIES))

    def exact_sibling(self, spec: Specialization, config: Config) -> Config:
        """See `Toolchain`."""
        return exact_sibling(config, spec)

    def most_keys(self, config: Config) -> int | None:
        """See `Toolchain`."""
        return most_keys(config)

    def default(self, workload: Workload) -> Config:
        """See `Toolchain`."""
        spec = specialization(workload)
        return usual(default_config(spec, self._device), spec, Sizes.of(workload), self._device)


def _forward_factory(compiled: CompiledKernel, spec: Specialization, config: Config, index: int) -> KernelFactory:
    return lambda q, k, v, out, features: make_plan(compiled, spec, config, Geometry.of(q, k, v, out, features), index)


def _backward_factory(compiled: CompiledKernel, spec: Specialization, config: Config, index: int) -> BackwardFactory:
    return lambda tensors, features: make_backward_plan(
        compiled, spec, config, backward_geometry(tensors, features), index
    )


def _decode_factory(compiled: CompiledKernel, spec: Specialization, config: Config, index: int) -> DecodeFactory:
    return decode_factory(DecodePlan(compiled, config, index))


_FACTORIES: dict[str, Callable[[CompiledKernel, Specialization, Config, int], Factory]] = {
    "forward": _forward_factory,
    "backward": _backward_factory,
    DECODE: _decode_factory,
}
