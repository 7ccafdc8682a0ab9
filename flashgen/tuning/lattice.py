"""The valid set of a family as points of a lattice: which configs are neighbours, and which is nearest."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.codegen.family import KernelFamily, Knob
from flashgen.codegen.space import search_space
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpace:
    """The enumerated valid set of one family, and its knobs with their values in order."""

    family: str
    knobs: tuple[Knob, ...]
    configs: tuple[Config, ...]

    @classmethod
    def of(cls, family: KernelFamily, spec: Specialization, device: Device) -> FamilySpace:
        """The valid set of `family` for `spec` on `device`; empty where it does not apply."""
        return cls(family=family.id, knobs=family.knobs, configs=search_space(family, spec, device))


class Lattice:
    """Distances and neighbours in a valid set: numbers are ordered, words and flags are equal or not."""

    def __init__(self, space: FamilySpace) -> None:
        knobs = sorted(space.knobs, key=lambda knob: knob.name)
        self._names = [knob.name for knob in knobs]
        self._steps = [{value: step for step, value in enumerate(knob.values)} for knob in knobs]
        self._is_scale = [all(type(value) is int for value in knob.values) for knob in knobs]
        self.points = {config: self._point(config) for config in space.configs}
        self._by_point = {point: config for config, point in self.points.items()}

    def neighbours(self, config: Config) -> list[Config]:
        """Valid configs one step away in one knob; any other word or flag is one step away."""
        point = self.points[config]
        found: list[Config] = []
        for axis, steps in enumerate(self._steps):
            here = point[axis]
            reach = (here - 1, here + 1) if self._is_scale[axis] else [s for s in range(len(steps)) if s != here]
            moved = (self._by_point.get((*point[:axis], step, *point[axis + 1 :])) for step in reach)
            found += [other for other in moved if other is not None]
        return found

    def nearest(self, wanted: Config, among: Iterable[Config]) -> Config:
        """The config of `among` with the smallest distance; the first one of equals."""
        # what each step of an axis is away from the target: distances were a fifth of the time of a search
        away = [self._away(axis, step) for axis, step in enumerate(self._point(wanted))]
        points = self.points
        # not `sum`, which rounds in another way since Python 3.12
        return min(
            among, key=lambda config: functools.reduce(operator.add, map(operator.getitem, away, points[config]))
        )

    def _point(self, config: Config) -> tuple[int, ...]:
        return tuple(steps[config[name]] for name, steps in zip(self._names, self._steps, strict=True))

    def _away(self, axis: int, here: int) -> list[float]:
        steps = range(len(self._steps[axis]))
        if self._is_scale[axis]:
            return [abs(step - here) / max(len(steps) - 1, 1) for step in steps]
        return [float(step != here) for step in steps]
