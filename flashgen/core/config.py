"""`Config`: a kernel family and the values of its knobs; the unit that is searched, stored and served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.core.errors import ConfigError

KnobValue = int | str | bool
"""What a knob may hold. JSON has all three, so a config survives a round trip unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A family id and its knob values, sorted by name: hashable, comparable, printable.

    A config is only a claim until `flashgen.codegen.families.validate` has checked every value against the
    family's declared knobs; nothing is rendered from one that has not been checked.
    """

    family: str
    knobs: tuple[tuple[str, KnobValue], ...]

    @classmethod
    def of(cls, family: str, knobs: Mapping[str, KnobValue]) -> Config:
        """Build a config from a mapping of knob names to values."""
        return cls(family=family, knobs=tuple(sorted(knobs.items())))

    @classmethod
    def from_json(cls, family: str, text: str) -> Config:
        """Read knob values from a JSON object.

        Raises:
            ConfigError: the text is not a JSON object of numbers, strings and booleans.
        """
        try:
            knobs = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"knobs must be a JSON object, got {text[:80]!r}: {error}") from error
        if not isinstance(knobs, dict):
            raise ConfigError(f"knobs must be a JSON object, got {text[:80]!r}")
        for name, value in knobs.items():
            if not isinstance(value, (bool, int, str)):
                raise ConfigError(f"knob {name} must be an integer, a string or a boolean, got {value!r}")
        return cls.of(family, knobs)

    def to_json(self) -> str:
        """The knob values as a JSON object with sorted names."""
        return json.dumps(dict(self.knobs), separators=(",", ":"))

    def __getitem__(self, knob: str) -> KnobValue:
        for name, value in self.knobs:
            if name == knob:
                return value
        raise ConfigError(f"{self.family} config has the knobs {[n for n, _ in self.knobs]}, not {knob!r}")

    def get(self, knob: str, default: KnobValue) -> KnobValue:
        """The value of a knob that a config may be older than, or what such a config means by it."""
        for name, value in self.knobs:
            if name == knob:
                return value
        return default

    def integer(self, knob: str) -> int:
        """The value of a knob that holds an integer.

        Raises:
            ConfigError: the knob is missing or holds something else.
        """
        value = self[knob]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"knob {knob} of {self.family} must be an integer, got {value!r}")
        return value

    def replace(self, **changes: KnobValue) -> Config:
        """The same config with some knobs changed."""
        return Config.of(self.family, {**dict(self.knobs), **changes})

    def __str__(self) -> str:
        return f"{self.family}({', '.join(f'{name}={value}' for name, value in self.knobs)})"
