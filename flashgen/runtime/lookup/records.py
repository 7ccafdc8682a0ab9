"""The records that a look-up chooses from: those of a class of workloads, checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flashgen.codegen.families import default_config, invalid, unconfirmed
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.nearest import Position, position
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Found, Layers


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
    """What can serve a specialization on a device: the records of its class by rung, and the default config.

    `same_bits` has the records of deterministic backward passes by the workload that may sum in any order.
    """

    default: Config
    exact: dict[Workload, tuple[Candidate, ...]]
    same_bits: dict[Workload, tuple[Candidate, ...]]
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
        elsewhere: list[Candidate] = []
        for record, layer in sorted(found, key=lambda each: each[0].device.identity != device.identity):
            candidate = _candidate(record, layer, spec, device)
            if device.may_use(record.device):
                own.setdefault(record.provenance, []).append(candidate)
            elif record.provenance == "measured":
                elsewhere.append(candidate)
        others = tuple(
            _candidate(record, layer, spec, device)
            for record, layer in twins
            if device.may_use(record.device)
            and record.provenance == "measured"
            and (record.config.family == default.family or not spec.deterministic)
        )
        exact = own["measured"] if spec.is_measured else []
        same_bits = others if spec.is_measured and not spec.deterministic else ()
        return cls(
            default=default,
            exact=_grouped((one.record.workload, one) for one in exact),
            same_bits=_grouped((replace(one.record.workload, deterministic=False), one) for one in same_bits),
            here=tuple(own["measured"]),
            twins=tuple(one for one in others if one.record.config.family == default.family),
            elsewhere=tuple(elsewhere),
            predicted=tuple(own["predicted"]),
        )


def _grouped(candidates: Iterable[tuple[Workload, Candidate]]) -> dict[Workload, tuple[Candidate, ...]]:
    found = dict[Workload, tuple[Candidate, ...]]()
    for workload, candidate in candidates:
        found[workload] = (*found.get(workload, ()), candidate)
    return found


def _candidate(record: TuningRecord, layer: str, spec: Specialization, device: Device) -> Candidate:
    reason = invalid(record.config, spec, device)
    is_measured = record.provenance == "measured" and record.workload.varlen == spec.varlen
    if reason is None and not is_measured:
        reason = unconfirmed(record.config, spec)
    return Candidate(
        record=record,
        layer=layer,
        reason=reason,
        position=position(record.workload),
        key=record.workload.key,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseChoices:
    """Records of calls without packed sequences whose configs may serve packed ones, of this device and of others."""

    here: tuple[Candidate, ...]
    elsewhere: tuple[Candidate, ...]


class Records:
    """The records of all layers by specialization class, read once a class and kept until `flashgen.reload`."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._classes: dict[tuple[str, str], tuple[Found, ...]] = {}
        self._choices: dict[tuple[Specialization, Device], Choices] = {}
        self._dense: dict[tuple[Specialization, Device], DenseChoices] = {}
        self.steps: dict[tuple[Any, ...], Any] = {}
        """What `decode_ladder` and `packed_ladder` found before, by class of calls."""

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

    def dense(self, spec: Specialization, device: Device) -> DenseChoices:
        """The dense records for a specialization of packed sequences: of its family, with configs that are valid.

        Raises:
            UnsupportedError: as of `choices`.
        """
        found = self._dense.get((spec, device))
        if found is None:
            family = self.choices(spec, device).default.family
            candidates = [
                _candidate(record, layer, spec, device)
                for record, layer in self.of(replace(spec, varlen=False), device)
                if record.provenance == "measured" and record.config.family == family
            ]
            able = [one for one in candidates if one.reason is None]
            is_here = [device.may_use(one.record.device) for one in able]
            found = self._dense[spec, device] = DenseChoices(
                here=tuple(one for one, here in zip(able, is_here, strict=True) if here),
                elsewhere=tuple(one for one, here in zip(able, is_here, strict=True) if not here),
            )
        return found
