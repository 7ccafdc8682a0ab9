"""Which record serves a call that has none: a small decision tree for each class where that beats the nearest record.

A class is `Specialization.workload_class`, since records of no other serve. A tree asks for sizes and names, in each
leaf, the config of one of the class's records (`flashgen.tuning.fallback_trees`). What a config takes on a workload is
its measured time where a table has it; else it is estimated from the number of knobs in which it differs from the
winner.

Everything is judged by leaving one workload out, its record and its table; how deep a tree is was chosen without it,
too. A tree serves a class only if it is then better than the nearest record in the mean by `GAIN`, no worse in the
worst case nor on any workload whose times are known, and better on so many more that chance does not explain it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.codegen.families import balanced, default_config, invalid, poor_at_sizes, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError
from flashgen.core.nearest import Position, distance, position
from flashgen.core.workload import Specialization
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.rules import (
    NEAREST,
    QUESTIONS,
    TREE,
    Answers,
    Expected,
    Leaf,
    Node,
    Rule,
    Split,
    answers,
)
from flashgen.tuning.fallback_trees import Rows, best_depth, text_of, tree_of
from flashgen.tuning.regrets import Known

LEAST_WORKLOADS = 6
"""Of a class to learn from."""

LEAST_TIMED = 1
"""Of them with a table."""

PER_KNOB, MOST_KNOBS, OTHER_FAMILY = 0.032, 4, 0.3
"""What is taken for the log of a config's time over the winner's where nobody timed it: so much for each knob in which
they differ, up to so many, or for another family. Fitted to 174 pairs of winners in tables of 47 workloads on an H200,
where it is off by 0.091 in the mean; a price for each knob is off by 0.089, and trees made with it were worse."""

GAIN = 0.003
"""Share of the time by which a tree has to be better in the mean, which is less than two races differ by."""

APART = 0.005
"""Ratios that are no farther apart are equal."""

SURE = 0.05
"""The most that may be left to chance: how likely a way to choose that is no better looks as good. With twice as much
two trees served; raced on shapes without a record, they lost to the nearest one wherever they chose another config."""

NOT_SERVED = 2.0
"""What a config is taken to be behind where it cannot serve or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload of a class: what is known of it, where it lies, and what a tree is told of it."""

    known: Known
    spec: Specialization
    device: Device
    position: Position
    answers: Answers
    default: Config
    _able: dict[Config, bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, known: Known, device: Device) -> Case:
        """That of a workload.

        Raises:
            UnsupportedError: no family serves it any more.
        """
        spec, sizes = specialization(known.workload), Sizes.of(known.workload)
        return cls(
            known=known,
            spec=spec,
            device=device,
            position=position(known.workload),
            answers=answers(sizes),
            default=usual(default_config(spec, device), spec, sizes, device),
        )

    def can_serve(self, config: Config) -> bool:
        """Whether a record with this config would serve here."""
        if config not in self._able:
            sizes = Sizes.of(self.known.workload)
            reason = invalid(config, self.spec, self.device) or poor_at_sizes(config, sizes)
            self._able[config] = reason is None
        return self._able[config]

    def served_by(self, config: Config) -> Config | None:
        """What serves here by a record with this config, with the tile that suits these sizes; None if it cannot."""
        if not self.can_serve(config):
            return None
        return balanced(config, self.spec, Sizes.of(self.known.workload), self.device)

    def is_timed(self, config: Config) -> bool:
        """Whether a table has its time."""
        return config in self.known.ratios

    def loss_by(self, config: Config) -> float:
        """As `loss`, of what serves by a record with this config."""
        served = self.served_by(config)
        return math.log(NOT_SERVED) if served is None else self.loss(served)

    def loss(self, config: Config) -> float:
        """The log of a config's time over the best one's, measured or estimated."""
        winner = self.known.winner
        found = self.known.regret(config) if self.can_serve(config) else NOT_SERVED
        if found is None and winner is not None:
            found = math.exp(estimated(config, winner)) * (self.known.regret(winner) or 1.0)
        return math.log(min(NOT_SERVED, found or NOT_SERVED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a way to choose costs on the workloads that it was not made from, in their order, as ratios."""

    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(math.fsum(map(math.log, self.ratios)) / len(self.ratios))

    @property
    def worst(self) -> float:
        """The most."""
        return max(self.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRule:
    """What was learned of a class: the rule, and what each way to choose costs on workloads that are left out.

    The rule has a tree wherever one could be learned; `serves` says whether that or the nearest record does. `timed`
    says of which workloads that is by measured times.
    """

    name: str
    rule: Rule
    serves: str
    workloads: tuple[str, ...]
    timed: tuple[bool, ...]
    outcomes: Mapping[str, Outcome]


FREQUENT, DEFAULT = "frequent", "default"
"""Ways to choose beside the rule's tree and the nearest record: the class's most frequent winner, the default."""


def estimated(config: Config, winner: Config) -> float:
    """The log of the time of a config over the winner's, where nobody timed it."""
    if config.family != winner.family:
        return OTHER_FAMILY
    return PER_KNOB * min(MOST_KNOBS, len(set(config.knobs) - set(winner.knobs)))


def learn(known: Iterable[Known], device: Device) -> list[LearnedRule]:
    """The rules of all classes of passes of any use, in the order of their names.

    Steps of decoding and packed sequences have ladders of their own, which this leaves alone.
    """
    every = [each for each in known if not each.workload.has_profiles]
    classes: dict[str, list[Case]] = {}
    for each in every:
        try:
            case = Case.of(each, device)
        except UnsupportedError:
            continue
        classes.setdefault(case.spec.workload_class, []).append(case)
    return [_learned(name, classes[name]) for name in sorted(classes) if len(classes[name]) > 1]


def _learned(name: str, cases: Sequence[Case]) -> LearnedRule:
    """Judge every way to choose without each workload in turn, then make the rule from all of them."""
    picked: dict[str, list[Config]] = {way: [] for way in (TREE, NEAREST, FREQUENT, DEFAULT)}
    can_learn = len(cases) >= LEAST_WORKLOADS
    whole = Rows.of(cases)
    for number, case in enumerate(cases):
        others = [*cases[:number], *cases[number + 1 :]]
        picked[NEAREST].append(nearest(case, others))
        picked[FREQUENT].append(frequent(case, others))
        picked[DEFAULT].append(case.default)
        if can_learn:
            rows = whole.without(number)
            leaf = Rule(tree=tree_of(rows, best_depth(rows)), nearest=None, why="").leaf(case.answers)
            served = case.served_by(leaf.config) if leaf else None
            picked[TREE].append(served or picked[NEAREST][-1])
    outcomes = {
        way: Outcome(ratios=tuple(math.exp(case.loss(c)) for case, c in zip(cases, configs, strict=True)))
        for way, configs in picked.items()
        if configs
    }
    timed = tuple(all(case.is_timed(picked[way][number]) for way in outcomes) for number, case in enumerate(cases))
    why, serves = _verdict(outcomes, timed)
    tree = tree_of(whole, best_depth(whole)) if TREE in outcomes else None
    return LearnedRule(
        name=name,
        rule=Rule(
            tree=None if tree is None else _expecting(tree, cases, outcomes[TREE].ratios, timed),
            nearest=_expected(outcomes[NEAREST].ratios, timed),
            why=why,
        ),
        serves=serves,
        workloads=tuple(case.known.workload.key for case in cases),
        timed=timed,
        outcomes=outcomes,
    )


def _verdict(outcomes: Mapping[str, Outcome], timed: Sequence[bool]) -> tuple[str, str]:
    """Why the tree serves or the nearest record does, and which of both."""
    if TREE not in outcomes:
        return f"{len(timed)} workloads are too few to learn from", NEAREST
    if sum(timed) < LEAST_TIMED:
        return f"{sum(timed)} of {len(timed)} workloads are timed, too few to learn from", NEAREST
    tree, near = outcomes[TREE], outcomes[NEAREST]
    pairs = list(zip(tree.ratios, near.ratios, strict=True))
    better, worse = (sum(b - a > APART for a, b in each) for each in (pairs, [(b, a) for a, b in pairs]))
    figures = (
        f"left out, workloads cost {tree.mean:.3f} by the tree, at most {tree.worst:.2f}, and {near.mean:.3f} by the "
        f"nearest record, at most {near.worst:.2f}; the tree is better on {better} and worse on {worse}"
    )
    is_better = tree.mean <= near.mean - GAIN and tree.worst <= near.worst and chance(better, worse) <= SURE
    is_worse = any(b - a > APART for (b, a), has_time in zip(pairs, timed, strict=True) if has_time)
    return figures, TREE if is_better and not is_worse else NEAREST


def chance(better: int, worse: int) -> float:
    """How likely two ways that are as good differ as much in one's favour (sign test)."""
    count = better + worse
    return math.fsum(math.comb(count, number) / 2**count for number in range(better, count + 1))


def nearest(case: Case, others: Iterable[Case]) -> Config:
    """What serves by the nearest of other records whose config can, else the default."""
    ranked = sorted(others, key=lambda each: (distance(case.position, each.position), each.known.workload.key))
    found = (case.served_by(each.known.served) for each in ranked if each.known.served is not None)
    return next((config for config in found if config is not None), case.default)


def frequent(case: Case, others: Iterable[Case]) -> Config:
    """What serves by the config that most of the other records have and that can, else the default."""
    wins = Counter(each.known.served for each in others if each.known.served is not None)
    ranked = sorted(wins, key=lambda config: (-wins[config], text_of(config)))
    found = (case.served_by(config) for config in ranked)
    return next((config for config in found if config is not None), case.default)


def _expecting(node: Node, cases: Sequence[Case], ratios: Sequence[float], timed: Sequence[bool]) -> Node:
    """A tree whose leaves say what workloads there lost when they were left out."""
    if isinstance(node, Leaf):
        return Leaf(config=node.config, expected=_expected(ratios, timed))
    place = QUESTIONS.index(node.question)
    sides: tuple[list[int], list[int]] = ([], [])
    for number, case in enumerate(cases):
        sides[case.answers[place] > node.most].append(number)
    below, above = (
        _expecting(side, [cases[n] for n in numbers], [ratios[n] for n in numbers], [timed[n] for n in numbers])
        for side, numbers in zip((node.below, node.above), sides, strict=True)
    )
    return Split(question=node.question, most=node.most, below=below, above=above)


def _expected(ratios: Sequence[float], timed: Sequence[bool]) -> Expected:
    found = Outcome(ratios=tuple(ratios))
    return Expected(mean=found.mean, worst=found.worst, workloads=len(ratios), timed=sum(timed))
