"""What a shell offers behind an option: names of GPUs, presets and kernel families, as `flashgen --show-completion`."""

from __future__ import annotations

from flashgen.core.record import PROVENANCES


def gpus(incomplete: str) -> list[tuple[str, str]]:
    """The names of known GPUs, each with what it is."""
    from flashgen.core.device import CATALOGUE

    named = [(device.slug.removeprefix("nvidia_").removeprefix("amd_"), device) for device in CATALOGUE]
    return [(name, f"{device.name}, {device.arch}") for name, device in named if name.startswith(incomplete)]


def models(incomplete: str) -> list[tuple[str, str]]:
    """The names of presets and of groups of them, each with its title."""
    from flashgen.tuning.workloads import ALL, PACKED, SERVING, TRAINING, presets

    groups = (
        (ALL, "every preset"),
        (TRAINING, "those with backward passes"),
        (SERVING, "those of steps of decoding"),
        (PACKED, "those of packed sequences"),
    )
    named = [*((preset.name, preset.title) for preset in presets()), *groups]
    return [each for each in named if each[0].startswith(incomplete)]


def families(incomplete: str) -> list[tuple[str, str]]:
    """The ids of kernel families, each with its title."""
    from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES

    rows = (*FAMILIES, *DECODE_FAMILIES)
    return [(row.id, row.title) for row in rows if row.id.startswith(incomplete)]


def directions(incomplete: str) -> list[str]:
    """What `--direction` takes."""
    from flashgen.tuning.workloads import DIRECTIONS

    return [name for name in DIRECTIONS if name.startswith(incomplete)]


def provenances(incomplete: str) -> list[str]:
    """What `--provenance` takes."""
    return [name for name in PROVENANCES if name.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """What `--format` takes."""
    from flashgen.cli.db_formats import FORMATS

    return [name for name in FORMATS if name.startswith(incomplete)]
