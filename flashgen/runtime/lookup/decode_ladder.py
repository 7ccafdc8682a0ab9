"""The look-up ladder for steps of decoding: from what a host knows of a call to the config that serves it.

Lengths never reach the host, and a new batch must not mean a new kernel. So calls are looked up by class: batch, query
rows of a key head and keys that they may see, each rounded up to a power of two, in the class of pages and features
that records are kept by. All calls of a class have one config, which is found once:

3., 4. a record of the class on this device, of the user or shipped
5. the nearest measured record of this device within `NEAR` whose tiles have such query rows, as it fits the class
6. likewise of another device of the architecture, which comes before rung 5 where it is nearer by more than
   `ELSEWHERE_STEPS`
8. the rule of the first family that applies, or of the next where that says that it is slower at such sizes

Of several records of a class, the one for any lengths comes first. A call whose bits must not depend on its batch
(`fixed_split_size`) is served by the rule, which reads its query rows alone: a record would make its bits depend on
where the nearest one was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flashgen.codegen.families import fitted, invalid, poor_at_sizes, usual, validate
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import power_of_two
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.lengths import ANY
from flashgen.core.nearest import Position, decode_position, distance
from flashgen.core.rungs import RUNGS
from flashgen.core.workload import Specialization
from flashgen.runtime.lookup.ladder import (
    FIRST_EXACT,
    LAST_EXACT,
    NEARER_ELSEWHERE,
    NEAREST_ELSEWHERE,
    NEAREST_HERE,
    Served,
    nearer_elsewhere,
)
from flashgen.runtime.lookup.records import Candidate, Choices, Records

NEAR = 4.0
"""Steps of `core.nearest`: 16 times the keys or the sequences, or 4 times both. What is farther away is left to the
rule, which was made for few and many sequences, and for short and long ones."""


def class_of(sizes: Sizes) -> Sizes:
    """The largest sizes of the class of some; no keys (0) is a class of its own, for bits that depend on no batch."""
    rows = power_of_two(sizes.seqlen_q * (sizes.nheads // sizes.nheads_k))
    return Sizes(
        batch=power_of_two(sizes.batch),
        nheads=rows * sizes.nheads_k,
        nheads_k=sizes.nheads_k,
        seqlen_q=1,
        seqlen_k=power_of_two(sizes.seqlen_k) if sizes.seqlen_k else 0,
    )


def served_step(
    spec: Specialization, sizes: Sizes, device: Device, records: Records, config: Config | None = None
) -> Served:
    """What serves a call of these sizes, once for each class.

    Raises:
        ConfigError: the explicit config is not valid here.
        UnsupportedError: no family supports the call.
    """
    if config is not None:
        reason = invalid(validate(config), spec, device)
        if reason is not None:
            raise ConfigError(f"{config} cannot serve {spec.key} on {device.name}: {reason}")
        return Served(config=config, rung=1)
    key = (spec, class_of(sizes), device)
    found: Served | None = records.steps.get(key)
    if found is None:
        found = records.steps[key] = _walked(*key, records)
    return found


def _walked(spec: Specialization, sizes: Sizes, device: Device, records: Records) -> Served:
    choices = records.choices(spec, device)
    skipped: list[str] = []
    for rung, candidates, none in _rungs(choices, spec, sizes, device):
        why_none = none
        for candidate in candidates:
            config, reason = _fitted(candidate, spec, sizes, device, is_exact=rung <= LAST_EXACT)
            if reason is None:
                record, layer = candidate.record, candidate.layer
                return Served(config=config, rung=rung, record=record, layer=layer, skipped=tuple(skipped))
            why_none = f"{config} cannot serve: {reason}"
        skipped.append(f"{rung}. {RUNGS[rung]}: {why_none}")
    return Served(config=usual(choices.default, spec, sizes, device), rung=8, skipped=tuple(skipped))


def _rungs(
    choices: Choices, spec: Specialization, sizes: Sizes, device: Device
) -> Iterator[tuple[int, list[Candidate], str]]:
    """The rungs in their order, with their candidates and why one has none."""
    if not sizes.seqlen_k:
        return
    at = decode_position(sizes.nheads // sizes.nheads_k, sizes.seqlen_k, sizes.batch * sizes.nheads_k)
    here, elsewhere, none = _near(choices.here, at), _near(choices.elsewhere, at), "no such record"
    exact = [one for one in here if class_of(Sizes.of(one.record.workload)) == sizes]
    yield FIRST_EXACT, [one for one in exact if one.is_users], none
    yield LAST_EXACT, [one for one in exact if not one.is_users], none
    own = [one for one in here if one not in exact]
    nearest = _first_able(own, spec, sizes, device)
    others = partial(_first_able, elsewhere, spec, sizes, device)
    if nearest is not None and nearer_elsewhere(nearest, at, others) is not None:
        yield NEAREST_HERE, [], NEARER_ELSEWHERE
    else:
        yield NEAREST_HERE, own, none
    yield NEAREST_ELSEWHERE, elsewhere, none


def _fitted(
    candidate: Candidate, spec: Specialization, sizes: Sizes, device: Device, *, is_exact: bool
) -> tuple[Config, str | None]:
    """The config of a record as it fits a class, and why it cannot serve that."""
    own = candidate.record.config
    config = fitted(own, spec, sizes, device)
    reason = invalid(config, spec, device)
    return config, reason if reason is not None or is_exact else poor_at_sizes(own, sizes)


def _first_able(candidates: list[Candidate], spec: Specialization, sizes: Sizes, device: Device) -> Candidate | None:
    return next((one for one in candidates if _fitted(one, spec, sizes, device, is_exact=False)[1] is None), None)


def _near(candidates: tuple[Candidate, ...], at: Position) -> list[Candidate]:
    """Those within `NEAR`, the nearest first; of one place those for any lengths."""
    ranked = [
        (distance(at, one.position), one.record.workload.lengths != ANY, one.order, number)
        for number, one in enumerate(candidates)
    ]
    return [candidates[number] for far, _, _, number in sorted(ranked) if far <= NEAR]
