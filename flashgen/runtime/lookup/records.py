"""The records that a look-up chooses from: those of a class of workloads, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashgen.codegen.families import (
    default_config,
    for_functions,
    invalid,
    most_programs,
    over_pages,
    poor_at_sizes,
    programs,
    share_template,
    why_too_many_keys,
)
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.nearest import Position, position
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import PACKAGED, SHIPPED, Found, Layers
from flashgen.runtime.lookup.rules import Rule, shipped_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One record of a class, with what every look-up asks of it.

    `config` is the record's, or what stands for it where the call has pages or functions and the record has none.
    """

    record: TuningRecord
    layer: str
    config: Config
    reason: str | None  # why that cannot serve here
    position: Position
    is_users: bool  # and came neither with flashgen nor with a package of records
    key: str
    few: Callable[[Sizes], str | None] | None  # why it is poor where it won with few programs alone

    def why_poor(self, sizes: Sizes) -> str | None:
        """The reason why its config is far from the best at sizes that it was not measured at, or None."""
        return poor_at_sizes(self.config, sizes) or (self.few(sizes) if self.few else None)

    @property
    def order(self) -> tuple[bool, str]:
        """Of records that are as far the first one serves: those of the user come before those that ship."""
        return not self.is_users, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What can serve a specialization on a device: the records of its class by rung, and the default config.

    `same_bits` has the records of deterministic backward passes by the workload that may sum in any order. `rule` says
    which of the records `here` serves at which sizes.
    """

    default: Config
    exact: dict[Workload, tuple[Candidate, ...]]
    same_bits: dict[Workload, tuple[Candidate, ...]]
    here: tuple[Candidate, ...]
    twins: tuple[Candidate, ...]
    elsewhere: tuple[Candidate, ...]
    predicted: tuple[Candidate, ...]
    rule: Rule | None = None

    @classmethod
    def of(
        cls,
        spec: Specialization,
        device: Device,
        default: Config,
        found: Iterable[Found],
        twins: Iterable[Found] = (),
        rule: Rule | None = None,
    ) -> Choices:
        """Check every record once, so that a look-up of another shape only compares positions."""
        own: dict[str, list[Candidate]] = {"measured": [], "predicted": []}
        elsewhere: list[Candidate] = []
        for record, layer in sorted(found, key=lambda each: each[0].device.identity != device.identity):
            candidate = _candidate(record, layer, spec, device, default.family)
            if device.may_use(record.device):
                own.setdefault(record.provenance, []).append(candidate)
            elif record.provenance == "measured":
                elsewhere.append(candidate)
        others = tuple(
            _candidate(record, layer, spec, device, default.family)
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
            rule=rule,
        )

    def with_config(self, config: Config) -> tuple[Candidate, ...]:
        """The records of this device that have a config."""
        return tuple(one for one in self.here if one.record.config == config)


def _grouped(candidates: Iterable[tuple[Workload, Candidate]]) -> dict[Workload, tuple[Candidate, ...]]:
    found = dict[Workload, tuple[Candidate, ...]]()
    for workload, candidate in candidates:
        found[workload] = (*found.get(workload, ()), candidate)
    return found


def _candidate(record: TuningRecord, layer: str, spec: Specialization, device: Device, family: str) -> Candidate:
    """`family` is that of the default config: calls with functions of the caller are served by its template alone."""
    config = record.config
    if spec.page_size and record.workload.page_size is None:
        config = over_pages(config, spec, device)
    if spec.mods is not None:
        config = for_functions(config, spec, device)
    reason = invalid(config, spec, device) or why_too_many_keys(config, record.workload.seqlen_k)
    if reason is None and spec.mods is not None and not share_template(config.family, family):
        reason = f"it was the fastest without functions of the caller, which {family} computes, too"
    return Candidate(
        record=record,
        layer=layer,
        config=config,
        reason=reason,
        position=position(record.workload),
        is_users=not layer.startswith((PACKAGED, SHIPPED)),
        key=record.workload.key,
        few=_few(config, record.workload, spec, device, family),
    )


def _few(
    config: Config, workload: Workload, spec: Specialization, device: Device, family: str
) -> Callable[[Sizes], str | None] | None:
    most = most_programs(config, spec, Sizes.of(workload), device, family)
    if most is None:
        return None

    def why(sizes: Sizes) -> str | None:
        count = programs(config, spec, sizes, device)
        return None if count <= most else f"it won over {family} with at most {most} programs, and here are {count}"

    return why


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideChoices:
    """Measured records of another class whose configs are valid for packed sequences, of this device and of others."""

    here: tuple[Candidate, ...] = ()
    elsewhere: tuple[Candidate, ...] = ()


class Records:
    """The records of all layers by specialization class, read once for a device and kept until `flashgen.reload`."""

    def __init__(self, layers: Layers, rules: Callable[[Device], Mapping[str, Rule]] = shipped_rules) -> None:
        self._layers, self._rules = layers, rules
        self._classes: dict[tuple[str, Device], tuple[Found, ...]] = {}
        self._choices: dict[tuple[Specialization, Device], Choices] = {}
        self._plainer: dict[tuple[Specialization, Device], BesideChoices] = {}
        self._other_pages: dict[tuple[Specialization, Device], BesideChoices] = {}
        self.steps: dict[tuple[Any, ...], Any] = {}
        """What `decode_ladder` and `packed_ladder` found before, by class of calls."""

    def of(self, spec: Specialization, device: Device) -> tuple[Found, ...]:
        """The records of the class on any device of this architecture, as `Layers.of_class` has them."""
        return self._of_class(spec.workload_class, device)

    def _of_class(self, name: str, device: Device) -> tuple[Found, ...]:
        key = (name, device)
        if key not in self._classes:
            self._classes[key] = tuple(self._layers.of_class(name, device))
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
            rule = self._rules(device).get(spec.workload_class)
            found = self._choices[spec, device] = Choices.of(spec, device, default, self.of(spec, device), twins, rule)
        return found

    def plainer(self, spec: Specialization, device: Device) -> BesideChoices:
        """For packed sequences over pages the records of those without, for others dense ones of the default's family.

        Raises:
            UnsupportedError: as of `choices`.
        """
        found = self._plainer.get((spec, device))
        if found is None:
            family = self.choices(spec, device).default.family
            plain = replace(spec, page_size=None) if spec.page_size else replace(spec, varlen=False)
            beside = [one for one in self.of(plain, device) if one[0].config.family == family]
            found = self._plainer[spec, device] = _beside(beside, spec, device, family)
        return found

    def other_pages(self, spec: Specialization, device: Device) -> BesideChoices:
        """For packed sequences over pages the records of those with pages of another class; else none."""
        found = self._other_pages.get((spec, device))
        if found is None:
            others = [name for name in spec.page_classes if name != spec.workload_class]
            beside = [one for name in others for one in self._of_class(name, device)]
            found = self._other_pages[spec, device] = _beside(
                beside, spec, device, self.choices(spec, device).default.family
            )
        return found


def _beside(found: Iterable[Found], spec: Specialization, device: Device, family: str) -> BesideChoices:
    measured = [(record, layer) for record, layer in found if record.provenance == "measured"]
    candidates = [_candidate(record, layer, spec, device, family) for record, layer in measured]
    able = [one for one in candidates if one.reason is None]
    is_here = [device.may_use(one.record.device) for one in able]
    return BesideChoices(
        here=tuple(one for one, here in zip(able, is_here, strict=True) if here),
        elsewhere=tuple(one for one, here in zip(able, is_here, strict=True) if not here),
    )
