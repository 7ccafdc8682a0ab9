"""The look-up ladder: from a workload on a device to the config that serves it.

It never searches, and never fails on a workload that some family supports.

1. an explicit config of the caller
2. the memo of this process (kept by `flashgen.runtime.ops.serve`, so a repeated shape never comes here)
3. the user's databases, a measured record of exactly this workload on this device
4. the shipped databases, likewise
5. the nearest measured record of the same specialization class on this device
6. the nearest measured record of the same class on another device of the same architecture
7. a predicted record of this device, exact or nearest
8. the default config of the first family that applies, as it fits the sizes of the call

A backward class has a twin that differs in determinism alone. Where rung 5 has no record of its own class, it takes the
nearest one of the twin that is of the family whose default would serve: tuned for the same kernel, it is better than
the default, while a record of another family may be slower.

Every config that a rung offers is checked again against the families' restrictions; one that cannot serve (a tensor
descriptor for unaligned tensors, say) leaves the call to the next candidate. So does one of rungs 5 to 7 that does not
fit the sizes of the call: that packs heads of a group into a tile where there are none, or does not where that would
save most of the work.
"Nearest" is what `flashgen.core.nearest` says. A call with a user's score functions is served from the records of its
class without them, none of which is exact.

Where torch's own attention was measured faster beside the exact record, the policy `fastest` hands the call to it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flashgen.codegen.families import fitted, invalid, poor_at_sizes, validate
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.nearest import distance, position
from flashgen.core.record import TuningRecord
from flashgen.core.rungs import RUNGS
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.lookup.records import Candidate, Choices, Records

LAST_EXACT = 4
"""Records of the rungs up to this one were measured at the sizes of the call."""

SHIPPED_PREFIX = "shipped/"
SDPA_IMPLS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
"""Names under which records keep the times of torch's backends: those of `measure.baselines`, without loading torch."""

SDPA_MASKED = "sdpa-efficient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the ladder answered: a config, the rung it came from, and why the rungs above did not serve."""

    config: Config
    rung: int
    record: TuningRecord | None = None
    layer: str | None = None
    skipped: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the record was measured for exactly this workload on this device."""
        return self.rung in (3, LAST_EXACT)


def resolve(
    workload: Workload, spec: Specialization, device: Device, records: Records, *, config: Config | None = None
) -> Served:
    """Walk the ladder of this module's docstring.

    Raises:
        ConfigError: the explicit config is not valid here.
        UnsupportedError: no family supports the workload; the message lists each one's reason.
    """
    if config is not None:
        reason = invalid(validate(config), spec, device)
        if reason is not None:
            raise ConfigError(f"{config} cannot serve {spec.key} on {device.name}: {reason}")
        return Served(config=config, rung=1)
    choices = records.choices(spec, device)
    sizes = Sizes.of(workload)
    skipped: list[str] = []
    for rung, candidates in _rungs(workload, choices):
        why_none = "no such record"
        for candidate in candidates:
            record, layer = candidate.record, candidate.layer
            reason = candidate.reason or (poor_at_sizes(record.config, sizes) if rung > LAST_EXACT else None)
            if reason is None:
                return Served(config=record.config, rung=rung, record=record, layer=layer, skipped=tuple(skipped))
            why_none = f"{record.config} cannot serve: {reason}"
        skipped.append(f"{rung}. {RUNGS[rung]}: {why_none}")
    return Served(config=fitted(choices.default, spec, sizes, device), rung=8, skipped=tuple(skipped))


def sdpa_backend(workload: Workload, spec: Specialization, served: Served) -> str | None:
    """The SDPA backend that was measured faster than the generated kernel on exactly this workload, or None.

    Only the policy `fastest` hands calls over, and only those that SDPA computes identically. Tensors that are not
    aligned to 16 bytes are not what was measured, and not every backend takes them.
    """
    if settings().policy != "fastest" or not served.is_exact or served.record is None or not spec.aligned16:
        return None
    best, time_ms = served.record.best_baseline, served.record.time_ms
    if best is None or best.impl not in SDPA_IMPLS or time_ms is None or best.median_ms >= time_ms:
        return None
    return best.impl if _sdpa_is_the_same(workload, spec, best.impl) else None


def _sdpa_is_the_same(workload: Workload, spec: Specialization, impl: str) -> bool:
    """Whether torch's call, made the way it was measured, computes this workload for any values of its tensors."""
    if spec.window or spec.softcap or spec.alibi or spec.sink or spec.mods is not None:
        return False
    if spec.bias or spec.mask:
        # one of them is `attn_mask`, with nothing beside it; rows that see no key are 0 in this backend alone
        alone = not (spec.bias and spec.mask) and not spec.causal and workload.nheads == workload.nheads_k
        return alone and impl == SDPA_MASKED and not spec.bias_dtype and spec.aligned_scores
    # top-left and bottom-right alignment agree
    return not (workload.causal and workload.seqlen_q != workload.seqlen_k)


def _rungs(workload: Workload, choices: Choices) -> Iterator[tuple[int, Iterable[Candidate]]]:
    exact = choices.exact.get(workload, ())
    yield 3, (one for one in exact if not one.layer.startswith(SHIPPED_PREFIX))
    yield 4, (one for one in exact if one.layer.startswith(SHIPPED_PREFIX))
    yield 5, itertools.chain(_nearest(workload, choices.here), _nearest(workload, choices.twins))
    for rung, candidates in ((6, choices.elsewhere), (7, choices.predicted)):
        yield rung, _nearest(workload, candidates)


def _nearest(workload: Workload, candidates: tuple[Candidate, ...]) -> Iterator[Candidate]:
    """The candidates, the nearest first; usually that one serves, so the others wait until they are asked for."""
    # of one workload's records, the one of an earlier layer stays first
    here = position(workload)
    ranked = [(distance(here, one.position), one.key, number) for number, one in enumerate(candidates)]
    heapq.heapify(ranked)
    while ranked:
        yield candidates[heapq.heappop(ranked)[2]]
