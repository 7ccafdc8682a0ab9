"""Which workloads to tune: model presets, shape strings, and YAML or JSON files in the presets' form."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

import yaml

from flashgen.core.errors import WorkloadError
from flashgen.core.names import meant
from flashgen.core.workload import Workload

ALL, TRAINING = "all", "training"
"""The names that stand for every preset, and for those of backward passes."""

DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
"""What a request may ask for, and the passes that it means."""

MAX_COMBINATIONS = 10_000
"""Workloads one entry may stand for; beyond it a list of values is a mistake, not a wish."""

_FIELDS = tuple(field.name for field in fields(Workload))
_KEYS = ("title", "source", "common", "workloads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named group of workloads and where its figures come from."""

    name: str
    title: str
    source: str
    workloads: tuple[Workload, ...]

    @property
    def direction(self) -> str:
        """`forward`, `backward` or `both`: the passes among its workloads."""
        found = {workload.direction for workload in self.workloads}
        return "both" if len(found) > 1 else found.pop()

    @property
    def is_training(self) -> bool:
        """Whether there are backward passes among its workloads."""
        return self.direction != "forward"


@functools.cache
def presets() -> tuple[Preset, ...]:
    """The presets that ship with flashgen, in the order of the file."""
    text = files("flashgen.tuning").joinpath("presets.yaml").read_text(encoding="utf-8")
    return _presets_of(text, "presets.yaml")


def preset(name: str) -> Preset:
    """The preset called `name`, in any case.

    Raises:
        WorkloadError: no preset has that name; the message lists them.
    """
    for candidate in presets():
        if candidate.name == name.lower():
            return candidate
    known = [p.name for p in presets()]
    likely = meant(name, [*known, ALL, TRAINING])
    raise WorkloadError(f"a model is one of {', '.join(known)}, or {ALL} or {TRAINING}, got {name!r}{likely}")


def load_file(path: Path) -> tuple[Preset, ...]:
    """Read groups of workloads from a YAML or JSON file in the form of presets.yaml.

    Raises:
        WorkloadError: the file cannot be read, or an entry breaks a rule; the message names the entry and the rule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"a workload file must be readable text, got {path}: {error}") from error
    return _presets_of(text, str(path))


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
        models: names of presets, `all` or `training`.
        shapes: keys or their shorthand.
        paths: files in the form of the presets.
        direction: a name of `DIRECTIONS`: the passes that are wanted of every shape that was named, whichever pass it
            was named for. None leaves each as it was named; a shape without a direction is a forward pass.
        deterministic: whether the backward passes must give the same bits every time.

    Raises:
        WorkloadError: a model, shape, file or direction is not valid, or determinism is asked of forward passes alone.
    """
    if direction is not None and direction not in DIRECTIONS:
        known = ", ".join(DIRECTIONS)
        raise WorkloadError(f"a direction is one of {known}, got {direction!r}{meant(direction, DIRECTIONS)}")
    groups: list[Iterable[Workload]] = []
    for model in models:
        groups += [p.workloads for p in _named(model)]
    groups += [(Workload.parse(shape),) for shape in shapes]
    groups += [p.workloads for path in paths for p in load_file(path)]
    found = list(itertools.chain.from_iterable(groups))
    if direction is not None:
        found = [replace(workload, direction=each) for workload in found for each in DIRECTIONS[direction]]
    if deterministic:
        if found and all(workload.direction == "forward" for workload in found):
            raise WorkloadError(
                "only a backward pass is asked for the same bits every time, a forward pass always gives them: "
                "name a bwd- shape or the direction backward or both"
            )
        found = [replace(workload, deterministic=True) for workload in found]
    return tuple(dict.fromkeys(found))


def _named(model: str) -> tuple[Preset, ...]:
    if model.lower() == ALL:
        return presets()
    if model.lower() == TRAINING:
        return tuple(p for p in presets() if p.is_training)
    return (preset(model),)


def _presets_of(text: str, where: str) -> tuple[Preset, ...]:
    try:
        document = yaml.safe_load(text)  # JSON is YAML
    except (yaml.YAMLError, RecursionError) as error:
        raise WorkloadError(f"a workload file must be YAML or JSON, got {where}: {error}") from error
    if not isinstance(document, dict) or not document:
        raise WorkloadError(
            f"a workload file maps names to groups of workloads, got {type(document).__name__} in {where}"
        )
    return tuple(_preset(str(name), body, f"{where}: {name}") for name, body in document.items())


def _preset(name: str, body: object, where: str) -> Preset:
    group = _mapping(body, where, _KEYS)
    common = _mapping(group.get("common", {}), f"{where}: common", _FIELDS)
    entries = group.get("workloads")
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"{where}: workloads must be a list with at least one entry, got {entries!r}")
    found: list[Workload] = []
    for position, entry in enumerate(entries, start=1):
        found += _entry(entry, common, f"{where}: entry {position}")
    return Preset(
        name=name.lower(),
        title=str(group.get("title", name)),
        source=str(group.get("source", "")),
        workloads=tuple(dict.fromkeys(found)),
    )


def _entry(entry: object, common: Mapping[str, object], where: str) -> list[Workload]:
    if isinstance(entry, str):
        return [_checked(where, entry)]
    values = {**common, **_mapping(entry, where, _FIELDS)}
    choices = [value if isinstance(value, list) else [value] for value in values.values()]
    combinations = functools.reduce(lambda product, choice: product * len(choice), choices, 1)
    if not 1 <= combinations <= MAX_COMBINATIONS:
        raise WorkloadError(
            f"{where}: lists of values must stand for 1 to {MAX_COMBINATIONS} workloads, got {combinations}"
        )
    return [_checked(where, dict(zip(values, row, strict=True))) for row in itertools.product(*choices)]


def _checked(where: str, value: str | dict[str, object]) -> Workload:
    try:
        if isinstance(value, str):
            return Workload.parse(value)
        _check_types(value)
        return Workload(**value)  # type: ignore[arg-type]
    except TypeError as error:
        missing = [name for name in ("batch", "nheads", "seqlen_q", "head_dim") if name not in value]
        raise WorkloadError(
            f"{where}: an entry needs batch, nheads, seqlen_q and head_dim; missing {missing}"
        ) from error
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from error


def _check_types(value: Mapping[str, object]) -> None:
    """YAML gives any scalar; a Workload field holds text, a flag, or a whole number."""
    for field in fields(Workload):
        if field.name not in value:
            continue
        got, kind = value[field.name], str(field.type)
        if "None" in kind and got is None:
            continue
        wanted: type = {"str": str, "bool": bool}.get(kind, int)
        if type(got) is not wanted:
            raise WorkloadError(f"{field.name} must be of type {wanted.__name__}, got {got!r}")


def _mapping(value: object, where: str, allowed: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: must be a mapping of {', '.join(allowed)}, got {value!r}")
    for name in value:
        if name not in allowed:
            likely = meant(str(name), allowed)
            raise WorkloadError(f"{where}: a name here is one of {', '.join(allowed)}, got {name!r}{likely}")
    return value
