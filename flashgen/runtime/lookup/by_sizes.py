"""`SizesLookup`: the ladder for workloads of one specialization that differ in sizes alone.

Every new length of a process asks it, so what sizes do not change is found once: which records can serve, and where
they lie. So is what serves lengths of as many blocks of rows, of which only handing a call over looks at the very
sizes. It answers what `flashgen.runtime.lookup.ladder` and `flashgen.runtime.lookup.handover` would, or nothing where
they have to be asked: for the workload of a record, and for a call that goes to torch's attention.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from flashgen.codegen.families import balanced, exact_sibling, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.device import Device
from flashgen.core.nearest import Position, distance, position_of
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import SHIPPED
from flashgen.runtime.lookup.few_queries import served_by_decoding
from flashgen.runtime.lookup.handover import faster_baseline, sdpa_backend
from flashgen.runtime.lookup.ladder import DEFAULT, NEAREST_ELSEWHERE, NEAREST_HERE, PREDICTED, Served, nearer_elsewhere
from flashgen.runtime.lookup.records import Candidate, Choices, Records
from flashgen.runtime.lookup.rules import answers, leaves

MOST_CHOICES = 4096
"""Of one specialization that are kept: more are of sizes that do not come again."""


class SizesLookup:
    """What serves the workloads of a specialization by their sizes."""

    def __init__(
        self, choices: Choices, workload: Workload, spec: Specialization, device: Device, records: Records
    ) -> None:
        """Prepare the records of a specialization.

        Args:
            choices: the records that may serve it.
            workload: any one; without a window, whose width would be one more size.
            spec: its specialization.
            device: the GPU.
            records: all there are.
        """
        self._records = records
        self._workload, self._spec, self._device, self._default = workload, spec, device, choices.default
        able = (workload for workload, exact in choices.exact.items() if any(one.reason is None for one in exact))
        self._exact = frozenset(Sizes.of(workload) for workload in able)
        self._own, self._elsewhere = NearestRecords(choices.here), NearestRecords(choices.elsewhere)
        self._rungs = (
            (NEAREST_HERE, self._own),
            (NEAREST_HERE, NearestRecords(choices.twins)),
            (NEAREST_ELSEWHERE, self._elsewhere),
            (PREDICTED, NearestRecords(choices.predicted)),
        )
        self._rule = choices.rule if choices.rule is not None and choices.here else None
        named = {leaf.config for leaf in leaves(self._rule.tree if self._rule else None)}
        self._named = {config: NearestRecords(choices.with_config(config)) for config in named}
        self._chosen: dict[Sizes, _Choice] = {}

    def config(
        self, sizes: Sizes, *, generated_only: bool, with_lse: bool = False, has_own_offset: bool = False
    ) -> Config | None:
        """The config that the generated kernel is served with, or None where the ladder has to be asked.

        Args:
            sizes: none of them 0.
            generated_only: whether torch's attention would not compute the same.
            with_lse: whether the call asks for the LSE, or trains.
            has_own_offset: whether it has a query offset, which no decode family takes.
        """
        if not has_own_offset and sizes.seqlen_q <= MAX_SEQLEN_Q:  # with more there is only a reason in words
            decoding = served_by_decoding(self._spec, sizes, sizes.seqlen_k, self._device, self._records)
            if not isinstance(decoding, str):
                return self._served(decoding.config, with_lse)
        if sizes in self._exact:
            return None
        near = sizes.in_blocks()
        choice = self._chosen.get(near)
        if choice is None:
            if len(self._chosen) >= MOST_CHOICES:
                self._chosen.clear()
            choice = self._chosen[near] = self._choose(near)
        config, rung, rival = choice
        if rival is not None and not generated_only and self._hands_over(rival, rung, sizes):
            return None
        return self._served(config, with_lse) if with_lse else config

    def _served(self, config: Config, with_lse: bool) -> Config:
        return exact_sibling(config, self._spec) if with_lse else config

    def _choose(self, sizes: Sizes) -> _Choice:
        """What serves sizes in whole blocks where no record is of the very sizes."""
        heads, group = sizes.batch * sizes.nheads, sizes.nheads // sizes.nheads_k
        here = position_of(sizes.seqlen_q, sizes.seqlen_k, heads, group)
        for rung, records in self._rungs:
            nearest = records.first(here, sizes)
            if nearest is not None:
                place, found = self._preferred(nearest, here, sizes) if records is self._own else (rung, nearest)
                config = balanced(found.config, self._spec, sizes, self._device)
                is_beaten = faster_baseline(found.record, is_exact=False) is not None
                return _Choice(config, place, found if is_beaten else None)
        return _Choice(usual(self._default, self._spec, sizes, self._device), DEFAULT, None)

    def _preferred(self, nearest: Candidate, here: Position, sizes: Sizes) -> tuple[int, Candidate]:
        """What serves in place of the nearest record of this device, as on the ladder, and the rung of that."""
        other = nearer_elsewhere(nearest, here, partial(self._elsewhere.first, here, sizes))
        if other is not None:
            return NEAREST_ELSEWHERE, other
        return NEAREST_HERE, self._by_rule(nearest, here, sizes) if self._named else nearest

    def _by_rule(self, nearest: Candidate, here: Position, sizes: Sizes) -> Candidate:
        """The record that the rule of the class prefers to the nearest one, which is of this device; as the ladder."""
        leaf = self._rule and self._rule.leaf(answers(sizes))
        if not leaf or not nearest.layer.startswith(SHIPPED):
            return nearest
        return self._named[leaf.config].first(here, sizes) or nearest

    def _hands_over(self, rival: Candidate, rung: int, sizes: Sizes) -> bool:
        """Whether a call of these very sizes goes to torch's attention."""
        served = Served(config=rival.record.config, rung=rung, record=rival.record, layer=rival.layer)
        workload = replace(
            self._workload,
            batch=sizes.batch,
            nheads=sizes.nheads,
            nheads_k=sizes.nheads_k,
            seqlen_q=sizes.seqlen_q,
            seqlen_k=sizes.seqlen_k,
        )
        return sdpa_backend(workload, self._spec, served) is not None


class _Choice(NamedTuple):
    """The config of sizes in whole blocks, the rung that it is of, and its record if torch's attention was faster."""

    config: Config
    rung: int
    rival: Candidate | None


class NearestRecords:
    """The records of a rung that can serve, in the order of their first coordinate, so that a search looks at few."""

    def __init__(self, candidates: tuple[Candidate, ...]) -> None:
        """Leave out the records whose configs cannot serve."""
        able = ((one.position, one.order, one) for one in candidates if one.reason is None)
        self._ordered = sorted(able, key=lambda one: one[0][0])  # records of one workload stay in their order
        self._first = [position[0] for position, *_ in self._ordered]

    def first(self, here: Position, sizes: Sizes) -> Candidate | None:
        """The nearest record whose config suits these sizes."""
        if not self._ordered:
            return None
        found = self._ordered[self._nearest(here)][2]
        if found.why_poor(sizes) is None:
            return found
        ranked = sorted((distance(here, at), order, number) for number, (at, order, _) in enumerate(self._ordered))
        others = (self._ordered[number][2] for _, _, number in ranked)
        return next((one for one in others if one.why_poor(sizes) is None), None)

    def _nearest(self, here: Position) -> int:
        """Outwards from the place of the first coordinate, to where that alone is farther than the nearest one."""
        ordered, (a, b, c, d, _) = self._ordered, here
        middle, least, found = bisect_left(self._first, a), float("inf"), 0
        for numbers in (range(middle, len(ordered)), range(middle - 1, -1, -1)):
            for number in numbers:
                (v, w, x, y, _), order, _ = ordered[number]
                along = abs(a - v)
                if along > least:
                    break
                # `distance` without a call, and without a window, which no workload here has
                steps = along + abs(b - w) + abs(c - x) + abs(d - y)
                if steps < least or (steps == least and (order, number) < (ordered[found][1], found)):
                    least, found = steps, number
        return found
