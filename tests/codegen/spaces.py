"""Some configs of a search space, drawn from all declared ones: by asking about each, as no enumeration does."""

from __future__ import annotations

import random

from flashgen.codegen.families import unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def some_of(
    row: KernelFamily, spec: Specialization, device: Device, count: int, generator: random.Random
) -> list[Config]:
    """`count` different configs of what `search_space` enumerates, each with the same chance."""
    if unsupported(row, spec, device) is not None:
        return []
    allowed, together = row.allowed_values(spec), row.knob_rows()
    single = {knob.name: allowed.get(knob.name, knob.values) for knob in row.knobs if knob.name not in together.names}
    limits = [allowed.get(name) for name in together.names]
    rows = [each for each in together.rows if all(a is None or v in a for a, v in zip(limits, each, strict=True))]
    found: dict[Config, None] = {}
    while len(found) < count:
        values = {name: generator.choice(values) for name, values in single.items()}
        config = Config.of(row.id, {**dict(zip(together.names, generator.choice(rows), strict=True)), **values})
        if row.invalid(spec, config, device) is None:
            found[config] = None
    return list(found)
