"""`KernelFamily`: one row of the families table, and the `Knob` and `Parameter` values that describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One dimension of a search space: its values in order, so that neighbours are one step apart.

    `default` is for a knob that came later: configs that were stored before it existed mean this value.
    """

    name: str
    values: tuple[KnobValue, ...]
    meaning: str
    default: KnobValue | None = None

    def allows(self, value: KnobValue) -> bool:
        """Whether `value` is declared; True is not 1 here."""
        return any(value == known and type(value) is type(known) for known in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One run-time parameter of a kernel: its name from the launch vocabulary and its Triton type.

    Names are bound by `flashgen.launch.arguments`; types are as in a Triton signature (`*bf16`, `i32`, `i64`, `fp32`,
    `tensordesc<bf16[1, 1, 128, 64]>`). `aligned16` tells the compiler that a pointer is a multiple of 16 bytes.
    """

    name: str
    type: str
    aligned16: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether Triton's JIT would specialise on the value (1, multiples of 16), which flashgen never wants."""
        return self.type in ("i32", "i64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What goes to the compiler beside the source; `maxnreg` 0 means no limit.

    `num_warps` are those of the launch's first partition: a warp-specialised Gluon kernel adds its own.
    """

    num_warps: int
    num_stages: int
    maxnreg: int = 0


TOLERATED_SPILLS = 64
"""Bytes of local memory of a thread: a few registers that are spilled outside of the loop cost nothing."""


def _no_favourites(spec: Specialization, device: Device) -> tuple[Config, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFamily:
    """One way to compute attention: a template, the workloads it applies to, its knobs and how it is launched.

    A new kernel is one template and one such row. `id` is permanent: databases name it.

    Attributes:
        why_not: the reason why the family does not apply to a specialization on a device, or None.
        why_invalid: the reason why a config of declared values cannot work there, or None.
        default: a config that is valid wherever the family applies, in constant time.
        values: what the template needs beside the parameters, by name.
        parameters: the run-time parameters, in order.
        options: what the compiler is told.
        programs: the number of programs of a launch for (config, device, batch, nheads, seqlen_q).
        language: "triton" or "gluon", the language of the template.
        favourites: valid configs that won before, for a search to begin with (beside the default).
        tolerated_spills: bytes of local memory of a thread up to which a kernel is worth measuring.
    """

    id: str
    title: str
    template: str
    direction: str
    knobs: tuple[Knob, ...]
    why_not: Callable[[Specialization, Device], str | None]
    why_invalid: Callable[[Specialization, Config, Device], str | None]
    default: Callable[[Specialization, Device], Config]
    values: Callable[[Specialization, Config], dict[str, object]]
    parameters: Callable[[Specialization, Config], tuple[Parameter, ...]]
    options: Callable[[Config], CompileOptions]
    programs: Callable[[Config, Device, int, int, int], int]
    language: str = "triton"
    favourites: Callable[[Specialization, Device], tuple[Config, ...]] = _no_favourites
    tolerated_spills: int = TOLERATED_SPILLS
