"""The search space of a family: every config that its restrictions leave, enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from flashgen.codegen.families import unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.quoting import shown
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
    of_default = tuple(knob.values.index(default[knob.name]) for knob in family.knobs)
    pairs = [[(knob.name, value) for value in knob.values] for knob in family.knobs]
    in_order = sorted(range(len(pairs)), key=lambda axis: family.knobs[axis].name)  # as in every config: once for all
    rest = (
        Config.of_declared(family.id, tuple([pairs[axis][place[axis]] for axis in in_order]))
        for place in sorted(_valid(family, spec, device))
        if place != of_default
    )
    return (default, *rest)


def _valid(family: KernelFamily, spec: Specialization, device: Device) -> Iterator[tuple[int, ...]]:
    """Where the valid configs are, a step for each knob.

    What a rule answers, it answers for every config that agrees with this one in the knobs that it looked at. So it is
    asked once for all of them: for ten thousand configs instead of a hundred thousand, where some thousand are valid.
    """
    allowed, together = family.allowed_values(spec), family.knob_rows()
    values = {knob.name: allowed.get(knob.name, knob.values) for knob in family.knobs}
    steps = {knob.name: {value: step for step, value in enumerate(knob.values)} for knob in family.knobs}
    any_step = [(name, [steps[name][value] for value in values[name]]) for name in values]
    rows = (dict(zip(together.names, row, strict=True)) for row in together.rows)
    waiting = [row for row in rows if all(value in values[name] for name, value in row.items())]
    while waiting:
        known = waiting.pop()
        seen = dict(known)
        is_valid = family.invalid(spec, _Watched(family.id, values, seen), device) is None
        found = list(seen.items())
        for at in range(len(known), len(found)):
            name = found[at][0]
            waiting += [dict([*found[:at], (name, other)]) for other in values[name][1:]]
        if is_valid:
            left = [[steps[name][seen[name]]] if name in seen else every for name, every in any_step]
            yield from itertools.product(*left)


class _Watched(Config):
    """A config of which a rule sees first values, and `seen` those that it has looked at, in that order."""

    __slots__ = ("_first", "_seen")

    _first: Mapping[str, tuple[KnobValue, ...]]
    _seen: dict[str, KnobValue]

    def __init__(self, family: str, values: Mapping[str, tuple[KnobValue, ...]], seen: dict[str, KnobValue]) -> None:
        for name, value in (("family", family), ("_first", values), ("_seen", seen)):
            object.__setattr__(self, name, value)

    def __getitem__(self, knob: str) -> KnobValue:
        try:
            return self._seen[knob]
        except KeyError:
            if knob not in self._first:
                raise ConfigError(f"{self.family} config has the knobs {[*self._first]}, not {shown(knob)}") from None
        return self._seen.setdefault(knob, self._first[knob][0])

    def get(self, knob: str, default: KnobValue) -> KnobValue:
        return self[knob] if knob in self._first else default

    @property
    def knobs(self) -> tuple[tuple[str, KnobValue], ...]:
        return tuple((name, self[name]) for name in sorted(self._first))

    def replace(self, **changes: KnobValue) -> Config:
        return _Changed(self, changes)


class _Changed(_Watched):
    """The same with some knobs changed, which say nothing of those that it has."""

    __slots__ = ("_changes",)

    _changes: Mapping[str, KnobValue]

    def __init__(self, watched: _Watched, changes: Mapping[str, KnobValue]) -> None:
        super().__init__(watched.family, watched._first, watched._seen)
        object.__setattr__(self, "_changes", changes)

    def __getitem__(self, knob: str) -> KnobValue:
        return self._changes[knob] if knob in self._changes else super().__getitem__(knob)

    def replace(self, **changes: KnobValue) -> Config:
        return _Changed(self, {**self._changes, **changes})
