"""The look-up ladder: from a workload on a device to the config that serves it.

It never searches, and never fails on a workload that some family supports.

1. an explicit config of the caller
2. the memo of this process (kept by `flashgen.runtime.ops.serve`, so a repeated shape never comes here)
3. the user's databases, a measured record of exactly this workload on this device
4. installed packages of records and the shipped databases, likewise
5. the nearest measured record of the same specialization class on this device, or, where a rule says so, the nearest
   one with another config (`flashgen.runtime.lookup.rules`)
6. the nearest measured record of the same class on another device of the same architecture, which comes before rung 5
   where it is nearer by more than `ELSEWHERE_STEPS`
7. a predicted record of this device, exact or nearest
8. the default config of the first family that applies, as it fits the sizes of the call

A backward class has a twin that differs in determinism alone. Where rung 5 has no record of its own class, it takes the
nearest one of the twin that is of the family whose default would serve: tuned for the same kernel, it is better than
the default, while a record of another family may be slower. Where rungs 3 and 4 have a record of a backward pass that
may sum in any order, and its deterministic twin was measured faster, the twin's config serves: what is the same every
time is right for both. A shipped twin does not come before a record of the user.

Every config that a rung offers is checked again against the families' restrictions; one that cannot serve (a tensor
descriptor for unaligned tensors, say) leaves the call to the next candidate. So does one of rungs 5 to 7 that does not
fit the sizes of the call: that packs heads of a group into a tile where there are none, or does not where that would
save most of the work. Where they serve, the tile is another one than the record's if that fills the SMs better
(`flashgen.codegen.family.KernelFamily.balanced`).
A call that asks for the LSE, or trains, is served by the exact sibling of a config whose LSE is not exact.
"Nearest" is what `flashgen.core.nearest` says; rungs 5 to 8 see the lengths of a call in whole blocks, as that does.
A call with a user's score functions is served from the records of its class without them, none of which is exact: from
those of the template that serves such calls without any record, with the default where its family says so
(`flashgen.codegen.family.KernelFamily.default_for_functions`).

`flashgen.runtime.lookup.handover` says which calls then go to torch's own attention.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from flashgen.codegen.families import balanced, exact_sibling, invalid, usual, validate, why_too_many_keys
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.nearest import Position, distance, position
from flashgen.core.record import TuningRecord
from flashgen.core.rungs import RUNGS
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import SHIPPED
from flashgen.runtime.lookup.records import Candidate, Choices, Records
from flashgen.runtime.lookup.rules import Rule, answers

FIRST_EXACT, LAST_EXACT = 3, 4
"""Records of these rungs, the user's and the shipped ones, were measured at the sizes of the call."""

NEAREST_HERE, NEAREST_ELSEWHERE, PREDICTED, DEFAULT = 5, 6, 7, 8
"""The rungs of the nearest record of this device, of the nearest one of another, of a predicted one, and of none."""

ELSEWHERE_STEPS = 1.0
"""What another device of the architecture counts as beside the distance. On an H100 that forgot one of its records at a
time, the nearest other one within a step costs 1.020 times the best config, an H200's of the same workload 1.023 (96
workloads); beyond one step 1.045 and 1.025 (143)."""

NEARER_ELSEWHERE = f"another device's is nearer by more than {ELSEWHERE_STEPS:g} step"
"""Why the nearest record of this device does not serve, where it could."""

TWIN_NOISE = 0.03
"""Times of two searches that are closer than this say nothing: those of one kernel differed by up to 2.8% in a race."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the ladder answered: a config, the rung it came from, and why the rungs above did not serve.

    `slower` is the workload's own record, where `record` is that of its faster deterministic twin. `rule` is that of
    the class where rung 5 serves with a record of its own.
    """

    config: Config
    rung: int
    record: TuningRecord | None = None
    layer: str | None = None
    skipped: tuple[str, ...] = ()
    slower: TuningRecord | None = None
    rule: Rule | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the record was measured for exactly this workload on this device."""
        return self.rung in (FIRST_EXACT, LAST_EXACT)

    def serving(self, config: Config) -> Served:
        """The same with another config in the place of its own."""
        return replace(self, config=config)


def resolve(
    workload: Workload,
    spec: Specialization,
    device: Device,
    records: Records,
    *,
    config: Config | None = None,
    with_lse: bool = False,
) -> Served:
    """Walk the ladder of this module's docstring; `with_lse` says that the call asks for the LSE, or trains.

    Raises:
        ConfigError: the explicit config is not valid here.
        UnsupportedError: no family supports the workload; the message lists each one's reason.
    """
    served = _walked(workload, spec, device, records, config)
    exact = exact_sibling(served.config, spec) if with_lse else served.config
    return served if exact == served.config else served.serving(exact)


def _walked(
    workload: Workload, spec: Specialization, device: Device, records: Records, config: Config | None
) -> Served:
    """The config that serves calls without an LSE.

    Raises:
        ConfigError: the explicit config is not valid here.
        UnsupportedError: no family supports the workload; the message lists each one's reason.
    """
    if config is not None:
        reason = invalid(validate(config), spec, device) or why_too_many_keys(config, workload.seqlen_k)
        if reason is not None:
            raise ConfigError(f"{config} cannot serve {spec.key} on {device.name}: {reason}")
        return Served(config=config, rung=1)
    choices = records.choices(spec, device)
    sizes = Sizes.of(workload).in_blocks()
    skipped: list[str] = []
    for rung, candidates, none in _rungs(workload, choices, sizes):
        why_none = none
        for candidate in candidates:
            record, layer = candidate.record, candidate.layer
            reason = candidate.reason or (candidate.why_poor(sizes) if rung > LAST_EXACT else None)
            if reason is None:
                twin = _faster_twin(choices.same_bits.get(workload, ()), record, rung) if rung <= LAST_EXACT else None
                if twin is not None:
                    return _by_twin(twin, record, skipped)
                rule = choices.rule if rung == NEAREST_HERE and any(one is candidate for one in choices.here) else None
                own = candidate.config
                served = own if rung <= LAST_EXACT else balanced(own, spec, sizes, device)
                return Served(config=served, rung=rung, record=record, layer=layer, skipped=tuple(skipped), rule=rule)
            why_none = f"{candidate.config} cannot serve: {reason}"
        skipped.append(f"{rung}. {RUNGS[rung]}: {why_none}")
    return Served(config=usual(choices.default, spec, sizes, device), rung=8, skipped=tuple(skipped))


def _rungs(workload: Workload, choices: Choices, sizes: Sizes) -> Iterator[tuple[int, Iterable[Candidate], str]]:
    """The rungs in their order, with their candidates and why one has none."""
    exact, none = choices.exact.get(workload, ()), "no such record"
    for rung in (FIRST_EXACT, LAST_EXACT):
        yield rung, (one for one in exact if _exact_rung(one) == rung), none
    own = _first_able(workload, choices.here, sizes)
    others = partial(_first_able, workload, choices.elsewhere, sizes)
    nearer = None if own is None else nearer_elsewhere(own, position(workload), others)
    if nearer is not None:
        yield NEAREST_HERE, (), NEARER_ELSEWHERE
        yield NEAREST_ELSEWHERE, (nearer,), none
    yield NEAREST_HERE, itertools.chain(_here(workload, choices, sizes), _nearest(workload, choices.twins)), none
    for rung, candidates in ((NEAREST_ELSEWHERE, choices.elsewhere), (PREDICTED, choices.predicted)):
        yield rung, _nearest(workload, candidates), none


def nearer_elsewhere(own: Candidate, here: Position, elsewhere: Callable[[], Candidate | None]) -> Candidate | None:
    """Another device's record that comes before the nearest one of this device, if there is one.

    Args:
        own: the nearest record of this device.
        here: where the call lies.
        elsewhere: finds the nearest one of other devices; it is only asked if that can be nearer.
    """
    steps = distance(here, own.position)
    other = elsewhere() if steps > ELSEWHERE_STEPS else None
    return other if other is not None and distance(here, other.position) + ELSEWHERE_STEPS < steps else None


def _first_able(workload: Workload, candidates: tuple[Candidate, ...], sizes: Sizes) -> Candidate | None:
    ranked = _nearest(workload, candidates)
    return next((one for one in ranked if one.reason is None and one.why_poor(sizes) is None), None)


def _exact_rung(candidate: Candidate) -> int:
    return FIRST_EXACT if candidate.is_users else LAST_EXACT


def _faster_twin(twins: tuple[Candidate, ...], own: TuningRecord, rung: int) -> Candidate | None:
    """The first record of the deterministic workload from no lower layer, if it is faster by more than the noise."""
    twin = next((one for one in twins if one.reason is None and _exact_rung(one) <= rung), None)
    return twin if twin is not None and _gain(twin.record, own) > TWIN_NOISE else None


def _gain(one: TuningRecord, other: TuningRecord) -> float:
    """How much faster one record is than another, on normal and on hard data where both have both.

    Not by the ratios to their reference kernels: these are torch's, and other ones where they are deterministic.
    """
    a, b = one.measurement, other.measurement
    assert a is not None
    assert b is not None
    if a.hard_times_ms and b.hard_times_ms:
        a, b = a.balanced, b.balanced
    return b.median_ms / a.median_ms - 1


def _by_twin(twin: Candidate, own: TuningRecord, skipped: list[str]) -> Served:
    rung = _exact_rung(twin)
    above = tuple(skipped[: rung - FIRST_EXACT])
    return Served(config=twin.record.config, rung=rung, record=twin.record, layer=twin.layer, skipped=above, slower=own)


def _here(workload: Workload, choices: Choices, sizes: Sizes) -> Iterator[Candidate]:
    """The records of the class, the nearest first; before that the nearest one with the config that a rule names.

    A rule was made from what ships, so that it does not come before a record of the user that is nearer.
    """
    leaf = None if choices.rule is None else choices.rule.leaf(answers(sizes))
    if leaf is not None:
        nearest = _first_able(workload, choices.here, sizes)
        if nearest is not None and nearest.layer.startswith(SHIPPED):
            yield from _nearest(workload, choices.with_config(leaf.config))
    yield from _nearest(workload, choices.here)


def _nearest(workload: Workload, candidates: tuple[Candidate, ...]) -> Iterator[Candidate]:
    """The candidates, the nearest first; usually that one serves, so the others wait until they are asked for."""
    # of one workload's records, the one of an earlier layer stays first
    here = position(workload)
    ranked = [(distance(here, one.position), one.order, number) for number, one in enumerate(candidates)]
    heapq.heapify(ranked)
    while ranked:
        yield candidates[heapq.heappop(ranked)[2]]
