"""Which few configs a search should begin with, chosen from what is known of a device's workloads.

For each class of workloads (`tuning.seed_lists.seed_class`) configs are taken one after the other, always the one that
brings the workloads of the class closest to their best (Nemhauser, Wolsey, Fisher, Mathematical Programming 14, 1978:
the greedy choice for a submodular gain), until each has one within `WITHIN`, or there are `MOST`. The default comes
before any list, so that a workload that it serves well needs none. A config that nobody timed on a workload, and that
is not its winner, is worth nothing there: what is not known is not assumed.

Each workload is also judged by the list that the class would have without it: what a list does for a new workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.codegen.families import applicable, fitted, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Specialization
from flashgen.measure.protocol import specialization
from flashgen.tuning.regrets import Known
from flashgen.tuning.seed_lists import GENERATED, HAND, as_valid, seed_class

MOST = 8
"""Configs of a list: a search of 18 s makes 15 trials."""

WITHIN = 0.03
"""A config no farther behind the best than this serves a workload: two searches differ by as much."""

LEAST_WORKLOADS = 4
"""Of a class to tell a learned list from a hand-written one that is any better than the default."""

NOT_KNOWN = 1.15
"""What a workload is taken to be behind its best where no config of the list is known there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload of a class: what is known of it, its default, and the hand-written lists of its families."""

    known: Known
    spec: Specialization
    device: Device
    default: Config
    hand: tuple[Config, ...]
    _here: dict[Config, Config | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, known: Known, device: Device) -> Row | None:
        """None where no family serves the workload any more."""
        spec, sizes = specialization(known.workload), Sizes.of(known.workload)
        try:
            families = applicable(spec, device)
        except UnsupportedError:
            return None
        defaults = [usual(family.default(spec, device), spec, sizes, device) for family in families]
        lists = (config for family in families for config in family.seed_configs(spec, device))
        hand = (*defaults[1:], *(fitted(config, spec, sizes, device) for config in lists))
        return cls(known=known, spec=spec, device=device, default=defaults[0], hand=tuple(dict.fromkeys(hand)))

    def regret(self, config: Config) -> float | None:
        """How far behind the best a config of a list is here; None where nobody knows, or where it is not valid."""
        if config not in self._here:
            found = as_valid([config], self.spec, Sizes.of(self.known.workload), self.device)
            self._here[config] = next(found, None)
        here = self._here[config]
        return None if here is None else self.known.regret(here)

    def least(self, configs: Iterable[Config]) -> float | None:
        """The regret of the best of a list and the default; None where none of them is known."""
        every = [self.known.regret(self.default), *(self.regret(config) for config in configs)]
        return min((each for each in every if each is not None), default=None)

    @property
    def by_hand(self) -> float | None:
        """That of the hand-written lists, the defaults of other families, and the default."""
        every = (self.known.regret(config) for config in (self.default, *self.hand))
        return min((each for each in every if each is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How far behind its best a workload is left by the default alone, and by that and each kind of list.

    `left_out` is by the list that the class has without this workload. None where nobody knows.
    """

    workload: str
    timed: int
    default: float | None
    hand: float | None
    generated: float | None
    left_out: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedList:
    """The list of a class, who serves it (`GENERATED` or `HAND`) and why."""

    name: str
    configs: tuple[Config, ...]
    judged: tuple[Judged, ...]
    hand_configs: int
    serves: str
    why: str


def learn(known: Iterable[Known], device: Device) -> list[LearnedList]:
    """The lists of all classes, in the order of their names."""
    classes: dict[str, list[Row]] = {}
    for each in known:
        row = Row.of(each, device)
        if row is not None:
            classes.setdefault(seed_class(row.spec), []).append(row)
    return [_learned(name, classes[name]) for name in sorted(classes)]


def chosen(rows: Sequence[Row], most: int = MOST) -> tuple[Config, ...]:
    """The list of some workloads, in the order in which they were chosen."""
    pool = _pool(rows)
    behind = [_loss(row.known.regret(row.default)) for row in rows]
    losses = {config: [_loss(row.regret(config)) for row in rows] for config in pool}
    found: list[Config] = []
    while len(found) < most and any(behind):
        gains = {
            config: math.fsum(max(0.0, now - then) for now, then in zip(behind, losses[config], strict=True))
            for config in pool
        }
        best = max(pool, key=lambda config: (gains[config], pool[config]), default=None)
        if best is None or gains[best] <= 0:
            break
        found.append(best)
        behind = [min(pair) for pair in zip(behind, losses[best], strict=True)]
    return tuple(found)


def is_near(regret: float | None) -> bool:
    """Whether that serves."""
    return regret is not None and regret <= 1 + WITHIN


def _pool(rows: Sequence[Row]) -> Mapping[Config, tuple[int, str]]:
    """What a list may have: winners and what was timed within reach of a best; of equal ones the more frequent first.

    The text makes a choice the same every time.
    """
    wins: dict[Config, int] = {}
    for row in rows:
        own = () if row.known.winner is None else (row.known.winner,)
        for config in own:
            wins[config] = wins.get(config, 0) + 1
        for config, ratio in row.known.ratios.items():
            if is_near(ratio):
                wins.setdefault(config, 0)
    return {config: (wins[config], f"{config.family} {config.to_json()}") for config in wins}


def _loss(regret: float | None) -> float:
    """What a list can still gain on a workload, as a logarithm: nothing where it is near the best."""
    return max(0.0, math.log(min(NOT_KNOWN, regret or NOT_KNOWN) / (1 + WITHIN)))


def _learned(name: str, rows: Sequence[Row]) -> LearnedList:
    configs = chosen(rows)
    judged = []
    for number, row in enumerate(rows):
        without = chosen([*rows[:number], *rows[number + 1 :]])
        judged.append(
            Judged(
                workload=row.known.workload.key,
                timed=len(row.known.ratios),
                default=row.known.regret(row.default),
                hand=row.by_hand,
                generated=row.least(configs),
                left_out=row.least(without),
            )
        )
    near = {kind: sum(is_near(getattr(each, kind)) for each in judged) for kind in ("default", "hand", "left_out")}
    hand_configs = max(len(row.hand) for row in rows)
    counts = f"{near['left_out']} of {len(rows)} workloads, the hand-written ones for {near['hand']}"
    why = f"learned without it, the list has a config within {WITHIN:.0%} of the best for {counts}"
    if too_few := len(rows) < LEAST_WORKLOADS and near["hand"] > near["default"]:
        why = f"{len(rows)} workloads are too few to learn from"
    return LearnedList(
        name=name,
        configs=configs,
        judged=tuple(judged),
        hand_configs=hand_configs,
        serves=HAND if too_few or near["left_out"] < near["hand"] else GENERATED,
        why=why,
    )
