"""The table of kernel families, and the checks that every config passes before anything is rendered from it."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.codegen.family import KernelFamily, Sizes
from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.codegen.hopper_decode.family import HOPPER_DECODE
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.codegen.portable_decode.family import PORTABLE_DECODE
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError, UnsupportedError
from flashgen.core.features.table import asked
from flashgen.core.names import meant
from flashgen.core.workload import DECODE, Specialization

FAMILIES: tuple[KernelFamily, ...] = (
    HOPPER_FORWARD,
    PORTABLE_FORWARD,
    HOPPER_BACKWARD_FUSED,
    HOPPER_BACKWARD_SPLIT,
    PORTABLE_BACKWARD_FUSED,
    PORTABLE_BACKWARD_SPLIT,
)
"""Every kernel family of forward and backward passes, in the order in which their defaults are preferred."""

DECODE_FAMILIES: tuple[KernelFamily, ...] = (HOPPER_DECODE, PORTABLE_DECODE)
"""Those of decoding over caches, which end without a launcher."""


_BY_ID = {row.id: row for row in (*FAMILIES, *DECODE_FAMILIES)}


def family(family_id: str) -> KernelFamily:
    """The family with this id.

    Raises:
        ConfigError: there is none.
    """
    row = _BY_ID.get(family_id)
    if row is not None:
        return row
    known = [*_BY_ID]
    raise ConfigError(f"a kernel family is one of {', '.join(known)}, got {family_id!r}{meant(family_id, known)}")


def validate(config: Config) -> Config:
    """`config`, once its family, knob names and values have been checked against the declared ones.

    A knob with a default may be missing: the config is older than the knob and means that value.

    Raises:
        ConfigError: the family is unknown, a knob is missing or unknown, or a value is not declared.
    """
    declared = {knob.name: knob for knob in family(config.family).knobs}
    given = dict(config.knobs)
    later = {knob.name: knob.default for knob in declared.values() if knob.default is not None}
    if len(given) == len(config.knobs) and later.keys() - given.keys():
        config = Config.of(config.family, {**later, **given})
        given = dict(config.knobs)
    if len(given) != len(config.knobs) or given.keys() != declared.keys():
        raise ConfigError(f"a {config.family} config has the knobs {sorted(declared)}, got {sorted(given)}")
    for name, value in config.knobs:
        if not declared[name].allows(value):
            raise ConfigError(f"knob {name} of {config.family} is one of {declared[name].values}, got {value!r}")
    return config


def reasons(spec: Specialization, device: Device) -> dict[str, str | None]:
    """For every family id the reason why it does not serve `spec` on `device`, or None where it does.

    Families of passes and those of decoding have nothing to do with each other, and are not listed together.
    """
    return {row.id: unsupported(row, spec, device) for row in _rows(spec)}


def _rows(spec: Specialization) -> tuple[KernelFamily, ...]:
    return DECODE_FAMILIES if spec.direction == DECODE else FAMILIES


def unsupported(row: KernelFamily, spec: Specialization, device: Device) -> str | None:
    """The reason why `row` does not serve `spec` on `device`, or None."""
    if spec.direction != row.direction:
        return f"it computes the {row.direction} pass, not {spec.direction}"
    return row.unsupported(spec, device) or _undeclared(row, spec)


def _undeclared(row: KernelFamily, spec: Specialization) -> str | None:
    """The reason against the first feature that is asked for and that the family does not declare, or None."""
    for feature in asked(spec):
        if feature.name not in row.features:
            return feature.absence(row.direction)
    return None


def invalid(config: Config, spec: Specialization, device: Device) -> str | None:
    """The reason why a validated config cannot serve `spec` on `device`, or None."""
    row = family(config.family)
    return unsupported(row, spec, device) or row.invalid(spec, config, device)


def applicable(spec: Specialization, device: Device, only: Sequence[str] = ()) -> tuple[KernelFamily, ...]:
    """The families that serve `spec` on `device`, preferred first; of those that `only` names, where it names any.

    Raises:
        ConfigError: `only` names a family that there is not.
        UnsupportedError: there is none; the message lists every family with its reason.
    """
    named = tuple(dict.fromkeys(family(name) for name in only))
    rows = tuple(row for row in _rows(spec) if (not named or row in named) and unsupported(row, spec, device) is None)
    if not rows:
        listed = "; ".join(f"{row.id}: {unsupported(row, spec, device)}" for row in named or _rows(spec))
        which = "no kernel family that is named" if named else "no kernel family"
        raise UnsupportedError(f"{which} serves {spec.key} on {device.name} ({device.arch}): {listed}")
    return rows


def fitted(config: Config, spec: Specialization, sizes: Sizes, device: Device) -> Config:
    """A valid config as it is best at sizes that a specialization does not know; most families have one for all."""
    return family(config.family).fitted(spec, config, sizes, device)


def usual(default: Config, spec: Specialization, sizes: Sizes, device: Device) -> Config:
    """A family's default as it serves sizes without any record: of most families as any config fits them.

    Where the next family that applies has a faster default at these sizes, that one's.
    """
    row, sizes = family(default.family), sizes.in_blocks()
    if row.slower_at(spec, sizes, device):
        rows = applicable(spec, device)
        others = rows[rows.index(row) + 1 :]
        if others:
            row, default = others[0], others[0].default(spec, device)
    return row.balanced(spec, (row.usual or row.fitted)(spec, default, sizes, device), sizes, device)


def poor_at_sizes(config: Config, sizes: Sizes) -> str | None:
    """The reason why a valid config that was not measured at these sizes is far from the best there, or None."""
    return why_too_many_keys(config, sizes.seqlen_k) or family(config.family).poor_at_sizes(config, sizes)


def most_keys(config: Config) -> int | None:
    """The keys that a launch of a config has at most; None is any number."""
    return family(config.family).most_keys(config)


def most_programs(config: Config, spec: Specialization, sizes: Sizes, device: Device, preferred: str) -> int | None:
    """The programs with which a record serves other sizes, if it won with as few over the family that is preferred.

    None is any number.

    Args:
        config: of the record.
        spec: what it is compiled for.
        sizes: of the record's workload.
        device: that it serves on.
        preferred: the id of the family whose default serves without records.
    """
    most = family(config.family).few_waves * device.num_sms
    if not most or config.family == preferred or spec.varlen:
        return None
    return most if programs(config, spec, sizes, device) <= most else None


def programs(config: Config, spec: Specialization, sizes: Sizes, device: Device) -> int:
    """The programs of the first kernel of a launch."""
    return family(config.family).kernels(spec, config)[0].programs(device, sizes)


def why_too_many_keys(config: Config, seqlen_k: int) -> str | None:
    """The reason why a valid config can never be launched with so many keys, or None."""
    most = most_keys(config)
    return None if most is None or seqlen_k <= most else f"it is for at most {most} keys, got {seqlen_k}"


def balanced(config: Config, spec: Specialization, sizes: Sizes, device: Device) -> Config:
    """A config that was measured at other sizes, with a tile whose CTAs fill the SMs better at these."""
    return family(config.family).balanced(spec, config, sizes.in_blocks(), device)


def beside(config: Config, spec: Specialization, device: Device) -> tuple[Config, ...]:
    """What `balanced` may serve in the place of a config at one size or another."""
    return family(config.family).beside(spec, config, device)


def over_pages(config: Config, spec: Specialization, device: Device) -> Config:
    """The config most like one that was measured without pages for a specialization that has them; may be invalid."""
    return family(config.family).over_pages(spec, config, device)


def share_template(one: str, other: str) -> bool:
    """Whether two families, by their ids, are kernels of one template."""
    return family(one).template == family(other).template


def for_functions(config: Config, spec: Specialization, device: Device) -> Config:
    """What serves functions of the caller in the place of a config that was measured without them; may be invalid."""
    row = family(config.family)
    return row.default(spec, device) if row.default_for_functions else config


def successor(config: Config, spec: Specialization) -> Config:
    """The config of today's families most like this one of an older record, which may be the same."""
    return family(config.family).successor(spec, config)


def default_config(spec: Specialization, device: Device, only: Sequence[str] = ()) -> Config:
    """The config that serves without any record, for sizes that nothing is known of.

    It is the default of the first family that applies, or of the next one where that is faster on this device.

    Raises:
        ConfigError: `only` names a family that there is not.
        UnsupportedError: no family applies.
    """
    rows = applicable(spec, device, only)
    row = rows[1] if len(rows) > 1 and rows[0].slower_on(spec, device) else rows[0]
    return row.default(spec, device)


def exact_sibling(config: Config, spec: Specialization) -> Config:
    """The config that serves the calls of this one that ask for an LSE, or train: most configs do themselves."""
    return family(config.family).exact_sibling(spec, config)
