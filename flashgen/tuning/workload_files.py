"""Files of workloads, in YAML or JSON: groups of shapes as `presets.yaml` has them.

Anybody may have written such a file. So its size, its merges and the number of workloads that it stands for have limits
that are checked before the work, and what a message quotes of it is short.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml

from flashgen.core.errors import WorkloadError
from flashgen.core.files import read_text
from flashgen.core.names import meant
from flashgen.core.quoting import shown
from flashgen.core.workload import Workload

MAX_BYTES = 2**18
"""Of a file: 6000 shapes of a line each. PyYAML reads that in some seconds."""

MAX_MERGED = 20_000
"""Names in the mappings of a file, and what `<<` takes over again: a chain of merges doubles with each link."""

MAX_WORKLOADS = 10_000
"""That one file may stand for; beyond it a list of values is a mistake, not a wish."""

_FIELDS = tuple(field.name for field in fields(Workload))
_KEYS = ("title", "source", "common", "workloads")

Values = dict[str, list[object]]
"""Fields of workloads, and the values that each takes in combination with all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named group of workloads and where its figures come from."""

    name: str
    title: str
    source: str
    workloads: tuple[Workload, ...]

    @property
    def direction(self) -> str:
        """`forward`, `backward`, `both` of these passes, or `decode`; of what is more, all names."""
        found = {workload.direction for workload in self.workloads}
        return "both" if found == {"forward", "backward"} else ", ".join(sorted(found))

    @property
    def is_training(self) -> bool:
        """Whether there are backward passes among its workloads."""
        return any(workload.direction == "backward" for workload in self.workloads)


def load_file(path: object) -> tuple[Preset, ...]:
    """Read groups of workloads from a YAML or JSON file in the form of presets.yaml.

    Raises:
        WorkloadError: the file cannot be read or is too large, or an entry breaks a rule; the message names the entry
            and the rule.
    """
    text = read_text(path, what="a workload file", most_bytes=MAX_BYTES, error=WorkloadError)
    return presets_of(text, str(path))


def presets_of(text: str, where: str) -> tuple[Preset, ...]:
    """The groups of a text, which `where` names in messages.

    Raises:
        WorkloadError: it breaks a rule.
    """
    groups = [_Group.of(name, body, where) for name, body in _document(text, where).items()]
    count = sum(_combinations(place, entry) for group in groups for place, entry in group.entries)
    if count > MAX_WORKLOADS:
        raise WorkloadError(f"a workload file stands for at most {MAX_WORKLOADS} workloads, got {count} in {where}")
    return tuple(group.preset() for group in groups)


class _Loader(yaml.SafeLoader):
    """Plain values alone, each name of a mapping once, and a limited number of merges."""

    merged = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as it is written, before merges, whose names may come again.

        Raises:
            WorkloadError: a name is there twice, of which PyYAML would keep the last one.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[object, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag in _WITHOUT_VALUE:
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1  # 1 and 0x1 are one name
            if name in lines:
                raise WorkloadError(
                    f"a mapping of a workload file has each name once, got {shown(name)} in line {lines[name]} and "
                    f"again in line {line}"
                )
            lines[name] = line
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Take over what `<<` names.

        Raises:
            WorkloadError: the mappings of the file have too many names by now.
        """
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > MAX_MERGED:
            raise WorkloadError(f"the mappings of a workload file have at most {MAX_MERGED} names, got more")


_WITHOUT_VALUE = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")
"""Of the names `<<`, which may be there several times, and `=`: PyYAML builds neither by itself."""

_UNREADABLE = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""PyYAML lets out what Python raises where a scalar is none of the kind that its form or its tag says."""


def _document(text: str, where: str) -> dict[object, object]:
    try:
        document = yaml.load(text, Loader=_Loader)  # JSON is YAML
    except WorkloadError as error:
        raise WorkloadError(f"{error}, in {where}") from None
    except _UNREADABLE as error:
        raise WorkloadError(f"a workload file must be YAML or JSON, got {where}: {error}") from error
    if not isinstance(document, dict) or not document:
        raise WorkloadError(
            f"a workload file maps names to groups of workloads, such as mine: {{workloads: [b4-h32-s4096-d128]}}, got "
            f"{f'a {type(document).__name__}' if document else 'nothing'} in {where}"
        )
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group whose form is right, before there are workloads."""

    name: str
    title: str
    source: str
    entries: tuple[tuple[str, str | Values], ...]

    @classmethod
    def of(cls, key: object, body: object, file: str) -> _Group:
        name = _words(key)
        where = f"{file}: {name}"
        group = _mapping(body, where, _KEYS)
        common = _mapping(group.get("common", {}), f"{where}: common", _FIELDS)
        entries = group.get("workloads")
        if not isinstance(entries, list) or not entries:
            raise WorkloadError(f"{where}: workloads must be a list with at least one entry, got {shown(entries)}")
        places = (f"{where}: entry {position}" for position in itertools.count(1))
        return cls(
            name=name,
            title=_words(group.get("title", name)),
            source=_words(group.get("source", "")),
            entries=tuple(
                (place, _values(entry, common, place)) for place, entry in zip(places, entries, strict=False)
            ),
        )

    def preset(self) -> Preset:
        found = itertools.chain.from_iterable(_workloads(place, entry) for place, entry in self.entries)
        workloads = tuple(dict.fromkeys(found))
        return Preset(name=self.name.lower(), title=self.title, source=self.source, workloads=workloads)


def _words(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def _values(entry: object, common: Mapping[str, object], where: str) -> str | Values:
    if isinstance(entry, str):
        return entry
    values = {**common, **_mapping(entry, where, _FIELDS)}
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def _combinations(where: str, entry: str | Values) -> int:
    """How many workloads an entry stands for."""
    if isinstance(entry, str):
        return 1
    count = functools.reduce(lambda product, choice: product * len(choice), entry.values(), 1)
    if not 1 <= count <= MAX_WORKLOADS:
        raise WorkloadError(f"{where}: lists of values must stand for 1 to {MAX_WORKLOADS} workloads, got {count}")
    return count


def _workloads(where: str, entry: str | Values) -> list[Workload]:
    try:
        if isinstance(entry, str):
            return [Workload.parse(entry)]
        missing = [name for name in ("batch", "nheads", "seqlen_q", "head_dim") if name not in entry]
        if missing:
            raise WorkloadError(f"an entry needs batch, nheads, seqlen_q and head_dim; missing {missing}")
        _check_types(entry)
        return [Workload(**dict(zip(entry, row, strict=True))) for row in itertools.product(*entry.values())]  # type: ignore[arg-type]
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from error


def _check_types(values: Values) -> None:
    """YAML gives any scalar; a Workload field holds text, a flag, or a whole number."""
    for field in fields(Workload):
        wanted: type = {"str": str, "bool": bool}.get(str(field.type), int)
        for value in values.get(field.name, ()):
            if type(value) is not wanted and not (value is None and field.default is None):
                raise WorkloadError(f"{field.name} must be of type {wanted.__name__}, got {shown(value)}")


def _mapping(value: object, where: str, allowed: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: must be a mapping of {', '.join(allowed)}, got {shown(value)}")
    for name in value:
        if name not in allowed:
            likely = meant(name, allowed) if isinstance(name, str) else ""
            raise WorkloadError(f"{where}: a name here is one of {', '.join(allowed)}, got {shown(name)}{likely}")
    return value
