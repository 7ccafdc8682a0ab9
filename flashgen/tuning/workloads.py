"""Which workloads to tune: model presets, shape strings, and YAML or JSON files in the presets' form."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from flashgen.core.checks import flag, items, text
from flashgen.core.errors import WorkloadError
from flashgen.core.names import meant
from flashgen.core.quoting import shown
from flashgen.core.workload import Workload
from flashgen.tuning.workload_files import Preset, load_file, presets_of

ALL, TRAINING, SERVING, PACKED = "all", "training", "serving", "packed"
"""What stands for every preset, for those with backward passes, of steps of decoding, and of packed sequences."""

FILES = ("presets.yaml", "serving.yaml", "packed.yaml")

DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
"""What a request may ask for, and the passes that it means."""


@functools.cache
def presets() -> tuple[Preset, ...]:
    """The presets that ship with flashgen, in the order of the files."""
    folder = files("flashgen.tuning")
    return tuple(p for name in FILES for p in presets_of(folder.joinpath(name).read_text(encoding="utf-8"), name))


def preset(name: str) -> Preset:
    """The preset called `name`, in any case.

    Raises:
        WorkloadError: no preset has that name; the message lists them.
    """
    wanted = text("a model", name).lower()
    for candidate in presets():
        if candidate.name == wanted:
            return candidate
    known = [p.name for p in presets()]
    groups = (ALL, TRAINING, SERVING, PACKED)
    likely = meant(name, [*known, *groups])
    raise WorkloadError(f"a model is one of {', '.join(known)}, or {' or '.join(groups)}, got {shown(name)}{likely}")


def collect(
    *,
    models: Iterable[str] = (),
    shapes: Iterable[str] = (),
    paths: Iterable[Path] = (),
    direction: str | None = None,
    deterministic: bool = False,
) -> tuple[Workload, ...]:
    """All workloads that were asked for, each once, in the order they were first named.

    Args:
        models: names of presets, `all`, `training`, `serving` or `packed`.
        shapes: keys or their shorthand.
        paths: files in the form of the presets.
        direction: a name of `DIRECTIONS`: the passes that are wanted of every shape that was named, whichever pass it
            was named for. None leaves each as it was named; a shape without a direction is a forward pass. Steps of
            decoding and passes over pages, which have no gradient, stay what they are.
        deterministic: whether the backward passes must give the same bits every time.

    Raises:
        WorkloadError: a model, shape, file or direction is not valid, or determinism is asked of forward passes alone.
    """
    if direction is not None and text("a direction", direction) not in DIRECTIONS:
        known = ", ".join(DIRECTIONS)
        raise WorkloadError(f"a direction is one of {known}, got {shown(direction)}{meant(direction, DIRECTIONS)}")
    groups: list[Iterable[Workload]] = []
    for model in items("models", models):
        groups += [p.workloads for p in _named(text("a model", model))]
    groups += [(Workload.parse(text("a shape", shape)),) for shape in items("shapes", shapes)]
    groups += [p.workloads for path in items("paths", paths) for p in load_file(path)]
    found = list(itertools.chain.from_iterable(groups))
    if direction is not None:
        found = [
            replace(workload, direction=each)
            for workload in found
            for each in ((workload.direction,) if _has_one_pass(workload) else DIRECTIONS[direction])
        ]
    if flag("deterministic", deterministic):
        if found and all(workload.direction != "backward" for workload in found):
            raise WorkloadError(
                "only a backward pass is asked for the same bits every time, a forward pass always gives them: "
                "name a bwd- shape or the direction backward or both"
            )
        found = [replace(workload, deterministic=True) for workload in found]
    return tuple(dict.fromkeys(found))


def _has_one_pass(workload: Workload) -> bool:
    return workload.is_decode or workload.page_size is not None


def _named(model: str) -> tuple[Preset, ...]:
    if model.lower() == ALL:
        return presets()
    if model.lower() == TRAINING:
        return tuple(p for p in presets() if p.is_training)
    if model.lower() == SERVING:
        return tuple(p for p in presets() if all(workload.is_decode for workload in p.workloads))
    if model.lower() == PACKED:
        return tuple(p for p in presets() if all(workload.is_packed for workload in p.workloads))
    return (preset(model),)
