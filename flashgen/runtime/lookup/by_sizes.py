"""`SizesLookup`: the ladder for workloads of one specialization that differ in sizes alone.

Every new length of a process asks it, so what sizes do not change is found once: which records can serve, where they
lie, and beside which of them torch's attention was faster. It answers what `flashgen.runtime.lookup.ladder` and
`flashgen.runtime.lookup.handover` would, or nothing where they have to be asked: for the workload of a record, and for
a call that goes to torch's attention.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial

from flashgen.codegen.families import balanced, exact_sibling, poor_at_sizes, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.device import Device
from flashgen.core.nearest import Position, distance, position_of
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import SHIPPED
from flashgen.runtime.lookup.few_queries import served_by_decoding
from flashgen.runtime.lookup.handover import faster_baseline, sdpa_backend
from flashgen.runtime.lookup.ladder import NEAREST_ELSEWHERE, NEAREST_HERE, PREDICTED, Served, nearer_elsewhere
from flashgen.runtime.lookup.records import Candidate, Choices, Records
from flashgen.runtime.lookup.rules import answers, leaves


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
        # by candidate: a look-up of it costs less than its workload's hash
        self._faster_beside: dict[int, bool] = {}

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
        found = self._found(sizes, generated_only=generated_only, may_decode=not has_own_offset)
        return exact_sibling(found, self._spec) if with_lse and found is not None else found

    def _found(self, sizes: Sizes, *, generated_only: bool, may_decode: bool) -> Config | None:
        if may_decode and sizes.seqlen_q <= MAX_SEQLEN_Q:  # with more there is only a reason to be put into words
            decoding = served_by_decoding(self._spec, sizes, sizes.seqlen_k, self._device, self._records)
            if not isinstance(decoding, str):
                return decoding.config
        if sizes in self._exact:
            return None
        heads, group = sizes.batch * sizes.nheads, sizes.nheads // sizes.nheads_k
        here = position_of(sizes.seqlen_q, sizes.seqlen_k, heads, group)
        for rung, records in self._rungs:
            nearest = records.first(here, sizes)
            if nearest is not None:
                place, found = self._preferred(nearest, here, sizes) if records is self._own else (rung, nearest)
                if not generated_only and self._hands_over(found, place, sizes):
                    return None
                return balanced(found.config, self._spec, sizes, self._device)
        return usual(self._default, self._spec, sizes, self._device)

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

    def _hands_over(self, candidate: Candidate, rung: int, sizes: Sizes) -> bool:
        """Whether a call goes to torch's attention, which sizes decide only where that was faster beside the record."""
        record, found = candidate.record, self._faster_beside.get(id(candidate))
        if found is None:
            found = self._faster_beside[id(candidate)] = faster_baseline(record, is_exact=False) is not None
        if not found:
            return False
        served = Served(config=record.config, rung=rung, record=record, layer=candidate.layer)
        workload = replace(
            self._workload,
            batch=sizes.batch,
            nheads=sizes.nheads,
            nheads_k=sizes.nheads_k,
            seqlen_q=sizes.seqlen_q,
            seqlen_k=sizes.seqlen_k,
        )
        return sdpa_backend(workload, self._spec, served) is not None


class NearestRecords:
    """The records of a rung that can serve, in the order of their first coordinate, so that a search looks at few."""

    def __init__(self, candidates: tuple[Candidate, ...]) -> None:
        """Leave out the records whose configs cannot serve."""
        able = ((one.position, one.key, one) for one in candidates if one.reason is None)
        self._ordered = sorted(able, key=lambda one: one[0][0])  # records of one workload stay in their order
        self._first = [position[0] for position, *_ in self._ordered]

    def first(self, here: Position, sizes: Sizes) -> Candidate | None:
        """The nearest record whose config suits these sizes."""
        if not self._ordered:
            return None
        found = self._ordered[self._nearest(here)][2]
        if poor_at_sizes(found.config, sizes) is None:
            return found
        ranked = sorted((distance(here, at), key, number) for number, (at, key, _) in enumerate(self._ordered))
        others = (self._ordered[number][2] for _, _, number in ranked)
        return next((one for one in others if poor_at_sizes(one.config, sizes) is None), None)

    def _nearest(self, here: Position) -> int:
        """Outwards from the place of the first coordinate, to where that alone is farther than the nearest one."""
        ordered, (a, b, c, d, _) = self._ordered, here
        middle, least, found = bisect_left(self._first, a), float("inf"), 0
        for numbers in (range(middle, len(ordered)), range(middle - 1, -1, -1)):
            for number in numbers:
                (v, w, x, y, _), key, _ = ordered[number]
                along = abs(a - v)
                if along > least:
                    break
                # `distance` without a call, and without a window, which no workload here has
                steps = along + abs(b - w) + abs(c - x) + abs(d - y)
                if steps < least or (steps == least and (key, number) < (ordered[found][1], found)):
                    least, found = steps, number
        return found
