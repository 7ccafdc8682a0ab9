"""The look-up ladder: from a workload on a device to the config that serves it.

It never searches, and never fails on a workload that some family supports.

1. an explicit config of the caller
2. the memo of this process (kept by `flashgen.runtime.serve`, so a repeated shape never comes here)
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

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flashgen.codegen.families import default_config, fitted, invalid, poor_at_sizes, validate
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.nearest import Position, distance, position
from flashgen.core.record import TuningRecord
from flashgen.core.rungs import RUNGS
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Found, Layers

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One record of a class, with what every look-up asks of it."""

    record: TuningRecord
    layer: str
    reason: str | None  # why its config cannot serve here
    position: Position
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What can serve a specialization on a device: the records of its class by rung, and the default config."""

    default: Config
    exact: dict[Workload, tuple[Candidate, ...]]
    here: tuple[Candidate, ...]
    twins: tuple[Candidate, ...]
    elsewhere: tuple[Candidate, ...]
    predicted: tuple[Candidate, ...]

    @classmethod
    def of(
        cls, spec: Specialization, device: Device, default: Config, found: Iterable[Found], twins: Iterable[Found] = ()
    ) -> Choices:
        """Check every record once, so that a look-up of another shape only compares positions."""
        own: dict[str, list[Candidate]] = {"measured": [], "predicted": []}
        elsewhere, exact = [], dict[Workload, tuple[Candidate, ...]]()
        for record, layer in found:
            candidate = _candidate(record, layer, spec, device)
            if record.device.identity == device.identity:
                own.setdefault(record.provenance, []).append(candidate)
            elif record.provenance == "measured":
                elsewhere.append(candidate)
        if spec.mods is None:
            for candidate in own["measured"]:
                workload = candidate.record.workload
                exact[workload] = (*exact.get(workload, ()), candidate)
        return cls(
            default=default,
            exact=exact,
            here=tuple(own["measured"]),
            twins=tuple(
                _candidate(record, layer, spec, device)
                for record, layer in twins
                if record.device.identity == device.identity
                and record.provenance == "measured"
                and record.config.family == default.family
            ),
            elsewhere=tuple(elsewhere),
            predicted=tuple(own["predicted"]),
        )


def _candidate(record: TuningRecord, layer: str, spec: Specialization, device: Device) -> Candidate:
    return Candidate(
        record=record,
        layer=layer,
        reason=invalid(record.config, spec, device),
        position=position(record.workload),
        key=record.workload.key,
    )


class Records:
    """The records of all layers by specialization class, read once a class and kept until `flashgen.reload`."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._classes: dict[tuple[str, str], tuple[Found, ...]] = {}
        self._choices: dict[tuple[Specialization, Device], Choices] = {}

    def of(self, spec: Specialization, device: Device) -> tuple[Found, ...]:
        """Every record of the class on any device of this architecture."""
        key = (spec.workload_class, device.arch)
        if key not in self._classes:
            found = self._layers.records(arch=device.arch, specialization=spec.workload_class, hidden=True)
            self._classes[key] = tuple(found)
        return self._classes[key]

    def choices(self, spec: Specialization, device: Device) -> Choices:
        """What of these records can serve a specialization.

        Raises:
            UnsupportedError: no family supports it; the message lists each one's reason.
        """
        found = self._choices.get((spec, device))
        if found is None:
            default = default_config(
                spec, device
            )  # before any look-up: what nobody supports is an error, record or not
            twins: tuple[Found, ...] = ()
            if spec.direction == "backward":
                twins = self.of(replace(spec, deterministic=not spec.deterministic), device)
            found = self._choices[spec, device] = Choices.of(spec, device, default, self.of(spec, device), twins)
        return found


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


def _nearest(workload: Workload, candidates: tuple[Candidate, ...]) -> list[Candidate]:
    # sorting is stable: of one workload's records, the one of an earlier layer stays first
    here = position(workload)
    return sorted(candidates, key=lambda one: (distance(here, one.position), one.key))
