"""Which configs of which workloads a replay table has: all of some families, a sample behind the lists, or winners."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flashgen.codegen.families import applicable, fitted, invalid, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates, related
from flashgen.tuning.context import Options
from flashgen.tuning.lattice import Lattice
from flashgen.tuning.starts import Start, starting_points

EVERY, SAMPLE, MATRIX = "every", "sample", "matrix"
"""Kinds of tables: all valid configs of the families, those that a search would start from and random ones behind them,
and configs that won somewhere."""


WHOLE = (
    "b4-h16-s4096-d128-causal",
    "b16-h16-s1024-d128-causal",
    "b4-h32-hk8-s4096-d128-causal",
    "b1-h16-s16384-d128-wl2047-causal",
    "b4-h16-s4096-d128",
    "b1-h24-s4608-d128",
    "b8-h32-s2048-d64-causal",
    "fp16-b8-h32-s2048-d64-causal",
    "b8-h32-s2048-d64",
    "b16-h32-s1024-d64",
    "b4-h8-s4096-d256-causal",
    "bwd-b4-h16-s4096-d128-causal",
    "bwd-b4-h32-hk8-s4096-d128-causal",
    "bwd-b4-h16-s4096-d128",
    "bwd-b8-h32-s2048-d64-causal",
    "bwd-b8-h32-s2048-d64",
)
"""Workloads of a matrix whose rows are whole: several of a class, whose winners meet each other's workloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The configs of one workload in the order in which they are measured, each with who names it.

    `candidates` is how many valid configs the families have for it; of a matrix, which counts none, those it has.
    """

    workload: Workload
    kind: str
    families: tuple[str, ...]
    starts: tuple[Start, ...]
    candidates: int


def searched(
    workload: Workload,
    device: Device,
    *,
    families: tuple[str, ...] = (),
    configs: int | None = None,
    seed: int = 0,
    records: Iterable[TuningRecord] = (),
) -> Plan:
    """What a search starts from, as far as it is of the families, then the other valid configs in random order.

    Args:
        workload: what to measure.
        device: where.
        families: of these alone; none named means all that apply.
        configs: how many; None means all.
        seed: of the order.
        records: known ones, for neighbours.
    """
    candidates = Candidates.of(workload, device, families)
    names = {space.family for space in candidates.spaces}
    classes = related(specialization(workload))
    known = [
        record
        for record in records
        if record.config.family in names and record.workload.specialization.workload_class in classes
    ]
    every = {config: None for space in candidates.spaces for config in space.configs}
    first = [
        start for start in starting_points(candidates, workload, device, Options(), known=known) if start[0] in every
    ]
    others = random.Random(f"{seed}/{workload.key}").sample(list(every), len(every))
    starts = _once([*first, *((config, "random") for config in others)])
    kind = EVERY if configs is None or configs >= len(starts) else SAMPLE
    return Plan(
        workload=workload,
        kind=kind,
        families=tuple(sorted(names)),
        starts=starts[:configs],
        candidates=candidates.count,
    )


def of_winners(
    workload: Workload, device: Device, records: Sequence[TuningRecord], most: int, *, whole: bool = False
) -> Plan:
    """The configs that won most often, as far as they are valid for the workload, and its own ones.

    Args:
        workload: what to measure.
        device: where.
        records: of the winners; what won in the other pass is no config of this one.
        most: configs of the plan.
        whole: where fewer of them are valid, have as many all the same: the configs nearest to the winners that are
            not, and then the surroundings of those that the plan has.
    """
    spec, sizes = specialization(workload), Sizes.of(workload)
    rows = applicable(spec, device)
    default = usual(rows[0].default(spec, device), spec, sizes, device)
    own = [record.config for record in records if record.workload == workload]
    wins = Counter(record.config for record in records if record.workload.specialization.direction == spec.direction)
    often = sorted(wins, key=lambda config: (-wins[config], config.family, config.to_json()))
    fit = (fitted(config, spec, sizes, device) for config in often if invalid(config, spec, device) is None)
    starts = [(default, "default"), *((each, "incumbent") for each in own), *((c, "neighbour") for c in fit)]
    chosen = _once(starts)[:most]
    if whole and len(chosen) < most:
        chosen = _once([*chosen, *_around(chosen, often, Candidates.of(workload, device))])[:most]
    names = tuple(sorted(row.id for row in rows))
    return Plan(workload=workload, kind=MATRIX, families=names, starts=chosen, candidates=len(chosen))


def _around(chosen: Sequence[Start], winners: Sequence[Config], candidates: Candidates) -> Iterator[Start]:
    """The valid configs nearest to those that are not, each family's default, then what is around all of them."""
    lattices = {space.family: Lattice(space) for space in candidates.spaces if space.configs}
    reached = dict.fromkeys(config for config, _ in chosen)
    for winner in winners:
        if winner.family in lattices:
            near = lattices[winner.family].nearest(winner, lattices[winner.family].points)
            reached.setdefault(near)
            yield near, "neighbour"
    for default in candidates.defaults:
        reached.setdefault(default)
        yield default, "default"
    front = list(reached)
    while front:
        config = front.pop(0)
        lattice = lattices.get(config.family)
        for other in lattice.neighbours(config) if lattice is not None and config in lattice.points else ():
            if other not in reached:
                reached[other] = None
                front.append(other)
                yield other, "local"


def spread(records: Iterable[TuningRecord], count: int) -> list[Workload]:
    """So many tuned workloads of as many classes as there are, the classes with the most records first.

    Of a class the one in the middle, by its operations.
    """
    classes: dict[str, list[Workload]] = {}
    for record in records:
        if record.provenance == "measured":
            classes.setdefault(record.workload.specialization.workload_class, []).append(record.workload)
    ordered = [sorted(classes[name], key=lambda each: (each.flops, each.key)) for name in sorted(classes)]
    ordered.sort(key=len, reverse=True)
    found: list[Workload] = []
    while len(found) < count and any(ordered):
        for members in ordered:
            if members and len(found) < count:
                found.append(members.pop(len(members) // 2))
    return found


def _once(starts: Iterable[Start]) -> tuple[Start, ...]:
    """Each config with the first one who names it."""
    found: dict[Config, str] = {}
    for config, source in starts:
        found.setdefault(config, source)
    return tuple(found.items())
