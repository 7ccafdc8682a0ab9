"""The search space of a family: every config that its restrictions leave, enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flashgen.codegen.family import KernelFamily
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def candidates(family: KernelFamily, spec: Specialization, device: Device) -> tuple[Config, ...]:
    """All valid configs of `family` for `spec` on `device`, the default first, then in knob order.

    The valid set is enumerated so that a sampler never proposes an invalid point. It is empty where the
    family does not apply.
    """
    if family.why_not(spec, device) is not None or spec.direction != family.direction:
        return ()
    default = family.default(spec, device)
    rest = (config for config in _all(family) if config != default and family.why_invalid(spec, config, device) is None)
    return (default, *rest)


def neighbours(family: KernelFamily, config: Config) -> tuple[Config, ...]:
    """The configs that differ from `config` in one knob by one step of its value list, valid or not."""
    return tuple(
        config.replace(**{knob.name: knob.values[step]})
        for knob in family.knobs
        for step in (knob.values.index(config[knob.name]) - 1, knob.values.index(config[knob.name]) + 1)
        if 0 <= step < len(knob.values)
    )


def distance(family: KernelFamily, one: Config, other: Config) -> float:
    """How far apart two configs are: the sum over knobs of the distance in their value lists, each scaled to 1."""
    total = 0.0
    for knob in family.knobs:
        gap = abs(knob.values.index(one[knob.name]) - knob.values.index(other[knob.name]))
        total += gap / max(len(knob.values) - 1, 1)
    return total


def _all(family: KernelFamily) -> Iterator[Config]:
    names = [knob.name for knob in family.knobs]
    for values in itertools.product(*(knob.values for knob in family.knobs)):
        yield Config.of(family.id, dict(zip(names, values, strict=True)))
