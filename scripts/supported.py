"""Writes docs/supported.md: what each kernel family computes on each class of devices, asked from the families table.

`make docs` runs it. A test fails while the page differs from what the table says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.codegen.families import FAMILIES, unsupported
from flashgen.codegen.family import KernelFamily
from flashgen.core.device import CATALOGUE, Device
from flashgen.core.features.table import FEATURES
from flashgen.core.workload import Specialization

PAGE = Path(__file__).parents[1] / "docs" / "supported.md"

DEVICES: tuple[Device, ...] = tuple({device.arch: device for device in reversed(CATALOGUE)}.values())[::-1]
"""One device of each architecture in the catalogue, the first one listed."""

BASE = Specialization(direction="forward", dtype="bf16", head_dim=128, head_dim_v=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the page: a name and the specialization that stands for it."""

    name: str
    spec: Specialization


def head_dim(size: int, size_v: int | None = None) -> Row:
    """The row of a head dimension, and of another one for the values."""
    name = f"head_dim {size}" if size_v is None else f"head_dim {size}, values {size_v}"
    return Row(name=name, spec=replace(BASE, head_dim=size, head_dim_v=size_v or size))


def row(name: str, **changes: object) -> Row:
    """The row of the base with `changes`."""
    return Row(name=name, spec=replace(BASE, **changes))  # type: ignore[arg-type]


def declared(group: str) -> tuple[Row, ...]:
    """The rows of a group that the table of features declares."""
    found = (one for feature in FEATURES for one in feature.support)
    return tuple(row(one.name, **one.fields) for one in found if one.group == group)


GROUPS: dict[str, tuple[Row, ...]] = {
    "Data types": (
        row("bf16"),
        row("fp16", dtype="fp16"),
        row("fp32, IEEE products", dtype="fp32"),
        row("fp32, TF32 products", dtype="tf32"),
    ),
    "Head dimensions": (
        *(head_dim(size) for size in (8, 16, 32, 64, 72, 80, 96, 128, 160, 192, 256, 320, 512, 576)),
        head_dim(192, 128),
        head_dim(576, 512),
    ),
    "Masks": declared("Masks"),
    "Scores": (
        *declared("Scores"),
        row(
            "all of these and a window and a mask",
            causal=True,
            window=True,
            softcap=True,
            alibi=True,
            sink=True,
            bias="full",
            mask="full",
        ),
    ),
    "Memory": (
        row("pointers or strides that are no multiples of 16 bytes", aligned16=False),
        *declared("Memory"),
    ),
}
GRADIENTS = tuple(
    row(one.name, **one.fields)
    for feature in sorted(FEATURES, key=lambda feature: feature.gradient is not None)
    for one in feature.gradient_support
)
"""What only a backward pass is asked for."""

TITLES = {"forward": "Forward pass", "backward": "Backward pass"}

INTRODUCTION = """\
# What is supported where

<!-- Written by `make docs` from the families table (scripts/supported.py); a test compares. Do not edit. -->

A cell is `yes` where a kernel family serves the row on that architecture, else the number of its reason below the
table. Each row is asked alone, in bf16 with heads of 128 columns where it does not say otherwise; rows combine unless a
reason forbids it, and `flashgen explain <shape> --target <gpu>` answers for any combination. Grouped heads, any
sequence lengths, any batch, any strides and the LSE are in every kernel, and backward passes also take the gradient of
the LSE. `yes` means that there is a kernel and a default configuration for it; the devices on which kernels have been
run are those of the README's benchmarks.
"""


def groups(direction: str) -> dict[str, tuple[Row, ...]]:
    """The rows of a pass, by the title of their group."""
    asked = GROUPS if direction == "forward" else {**GROUPS, "Gradients": GRADIENTS}
    return {
        title: tuple(Row(name=r.name, spec=replace(r.spec, direction=direction)) for r in rows)
        for title, rows in asked.items()
    }


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for direction, title in TITLES.items():
        parts += [f"## {title}, any family", "", *_any_table(direction), ""]
    return "\n".join([*parts, *(_family_section(family) for family in FAMILIES)])


def _any_table(direction: str) -> list[str]:
    def cell(spec: Specialization, device: Device) -> str:
        return "yes" if any(unsupported(family, spec, device) is None for family in FAMILIES) else "no"

    return _table(groups(direction), DEVICES, cell)


def _family_section(family: KernelFamily) -> str:
    """The table of one family over the devices that it serves at all, then its reasons."""
    asked = groups(family.direction)
    rows = [entry for group in asked.values() for entry in group]
    devices = tuple(device for device in DEVICES if any(unsupported(family, r.spec, device) is None for r in rows))
    reasons: dict[str, int] = {}

    def cell(spec: Specialization, device: Device) -> str:
        reason = unsupported(family, spec, device)
        return "yes" if reason is None else str(reasons.setdefault(_rule(reason), len(reasons) + 1))

    lines = [f"## `{family.id}`", "", f"{family.title}: {family.direction} pass", ""]
    lines += [*_table(asked, devices, cell), ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    lines += [f"\nNot on {', '.join(names)}: {rule}." for rule, names in _elsewhere(family, devices).items()]
    return "\n".join([*lines, ""])


def _elsewhere(family: KernelFamily, devices: tuple[Device, ...]) -> dict[str, list[str]]:
    """The other architectures by the rule that leaves them out."""
    found: dict[str, list[str]] = {}
    base = replace(BASE, direction=family.direction)
    for device in DEVICES:
        if device not in devices:
            found.setdefault(_rule(unsupported(family, base, device) or ""), []).append(device.arch)
    return found


def _rule(reason: str) -> str:
    """A reason without the value that broke it, so that one rule has one number."""
    return re.sub(r", not \S+$", "", reason)


def _table(
    asked: dict[str, tuple[Row, ...]], devices: tuple[Device, ...], cell: Callable[[Specialization, Device], str]
) -> list[str]:
    lines = [f"| | {' | '.join(device.arch for device in devices)} |", f"|---|{'---|' * len(devices)}"]
    for title, group in asked.items():
        lines.append(f"| **{title}** |{' |' * len(devices)}")
        lines += [f"| {r.name} | {' | '.join(cell(r.spec, device) for device in devices)} |" for r in group]
    return lines


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
