"""The search space of a family: every config that its restrictions leave, enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flashgen.codegen.families import unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def search_space(family: KernelFamily, spec: Specialization, device: Device) -> tuple[Config, ...]:
    """All valid configs of `family` for `spec` on `device`, the default first, then in knob order.

    What follows from the sizes of a workload is left to `KernelFamily.fitted`.

    The valid set is enumerated so that a sampler never proposes an invalid point. It is empty where the
    family does not apply.
    """
    if unsupported(family, spec, device) is not None:
        return ()
    default = family.default(spec, device)
    steps = [{value: step for step, value in enumerate(knob.values)} for knob in family.knobs]
    names = [knob.name for knob in family.knobs]

    def place(config: Config) -> list[int]:
        return [step[config[name]] for name, step in zip(names, steps, strict=True)]

    rest = (
        config for config in _all(family, spec) if config != default and family.invalid(spec, config, device) is None
    )
    return (default, *sorted(rest, key=place))


def _all(family: KernelFamily, spec: Specialization) -> Iterator[Config]:
    allowed, together = family.allowed_values(spec), family.knob_rows()
    single = [knob for knob in family.knobs if knob.name not in together.names]
    names = (*together.names, *(knob.name for knob in single))
    in_order = sorted(range(len(names)), key=names.__getitem__)  # as in every config: once, and not for each of them
    limits = [allowed.get(name) for name in together.names]
    rows = [row for row in together.rows if all(a is None or v in a for a, v in zip(limits, row, strict=True))]
    for row in rows:
        for values in itertools.product(*(allowed.get(knob.name, knob.values) for knob in single)):
            found = (*row, *values)
            yield Config(family=family.id, knobs=tuple((names[at], found[at]) for at in in_order))
