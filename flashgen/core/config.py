"""`Config`: a kernel family and the values of its knobs; the unit that is searched, stored and served."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen.core.errors import ConfigError
from flashgen.core.quoting import shown

KnobValue = int | str | bool
"""What a knob may hold. JSON has all three, so a config survives a round trip unchanged."""

_KINDS = frozenset((int, str, bool))
_RULE = "a config has the name of a family and the names of knobs, each with an integer, a string or a boolean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A family id and its knob values, sorted by name: hashable, comparable, printable.

    A config is only a claim until `flashgen.codegen.families.validate` has checked every value against the
    family's declared knobs; nothing is rendered from one that has not been checked.
    """

    family: str
    knobs: tuple[tuple[str, KnobValue], ...]
    # the rules of a family ask each of a search space's thousands of configs for a dozen knobs
    _values: dict[str, KnobValue] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.family) is not str or type(self.knobs) is not tuple or not _are_knobs(self.knobs):
            raise ConfigError(f"{_RULE}, got {shown(self.family)} and {shown(self.knobs)}")
        object.__setattr__(self, "_values", dict(self.knobs))

    @classmethod
    def of(cls, family: str, knobs: Mapping[str, KnobValue]) -> Config:
        """Build a config from a mapping of knob names to values.

        Raises:
            ConfigError: it is none, or what it holds are no names and values.
        """
        if not isinstance(knobs, Mapping):
            raise ConfigError(f"knobs are a mapping of names to values, got {shown(knobs)}")
        try:
            in_order = tuple(sorted(knobs.items()))
        except TypeError:  # names that do not compare
            raise ConfigError(f"{_RULE}, got {shown(knobs)}") from None
        return cls(family=family, knobs=in_order)

    @classmethod
    def of_declared(cls, family: str, knobs: tuple[tuple[str, KnobValue], ...]) -> Config:
        """One of the thousands of a search space, whose names are sorted and whose values declared: not looked at."""
        config = object.__new__(cls)
        for name, value in (("family", family), ("knobs", knobs), ("_values", dict(knobs))):
            object.__setattr__(config, name, value)
        return config

    @classmethod
    def from_json(cls, family: str, text: str) -> Config:
        """Read knob values from a JSON object.

        Raises:
            ConfigError: the text is not a JSON object of numbers, strings and booleans.
        """
        try:
            knobs = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"knobs must be a JSON object, got {shown(text)}: {error}") from error
        if not isinstance(knobs, dict):
            raise ConfigError(f"knobs must be a JSON object, got {shown(text)}")
        for name, value in knobs.items():
            if not isinstance(value, (bool, int, str)):
                raise ConfigError(f"knob {name} must be an integer, a string or a boolean, got {shown(value)}")
        return cls.of(family, knobs)

    def to_json(self) -> str:
        """The knob values as a JSON object with sorted names."""
        return json.dumps(dict(self.knobs), separators=(",", ":"))

    def __getitem__(self, knob: str) -> KnobValue:
        try:
            return self._values[knob]
        except (KeyError, TypeError):
            names = [name for name, _ in self.knobs]
            raise ConfigError(f"{self.family} config has the knobs {names}, not {shown(knob)}") from None

    def get(self, knob: str, default: KnobValue) -> KnobValue:
        """The value of a knob that a config may be older than, or what such a config means by it."""
        try:
            return self._values.get(knob, default)
        except TypeError:  # what is no name
            return default

    def integer(self, knob: str) -> int:
        """The value of a knob that holds an integer.

        Raises:
            ConfigError: the knob is missing or holds something else.
        """
        value = self[knob]
        if type(value) is not int:
            raise ConfigError(f"knob {knob} of {self.family} must be an integer, got {value!r}")
        return value

    def replace(self, **changes: KnobValue) -> Config:
        """The same config with some knobs changed."""
        values = {**self._values, **changes}
        if len(values) == len(self._values) and _are_knobs(changes.items()):
            return Config.of_declared(self.family, tuple(values.items()))  # the same names, in their order
        return Config.of(self.family, values)

    def __str__(self) -> str:
        return f"{self.family}({', '.join(f'{name}={value}' for name, value in self.knobs)})"


def _are_knobs(knobs: Iterable[Any]) -> bool:
    try:
        for name, value in knobs:
            if type(name) is not str or type(value) not in _KINDS:
                return False
    except (TypeError, ValueError):  # what is no pair
        return False
    return True
