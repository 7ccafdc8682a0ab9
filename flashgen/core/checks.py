"""Rules of single values that many arguments share; each refusal says the rule and then the value.

What is returned is a plain Python value: numpy's numbers are taken, and left behind.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import TypeVar

from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.core.quoting import shown

T = TypeVar("T")
Error = type[FlashgenError]

MAX_SIZE = 2**31 - 1
"""Of a batch, a number of heads, a length: kernels count in 32 bits."""


def whole_number(
    name: str, value: object, least: int | None, most: int | None = MAX_SIZE, error: Error = WorkloadError
) -> int:
    """A whole number within these limits, inclusive; None is no limit.

    Raises:
        FlashgenError: of the class `error`, where it is none.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise error(f"{name} must be a whole number, got {shown(value)}")
        value = int(value)
    if least is not None and value < least:
        raise error(f"{name} must be at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise error(f"{name} must be at most {most}, got {shown(value)}")
    return value


def real_number(name: str, value: object, error: Error = WorkloadError) -> float:
    """A number with a place among the floats: no NaN, no infinity, no text and no flag.

    Raises:
        FlashgenError: of the class `error`, where it is none.
    """
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise error(f"{name} must be a number, got {shown(value)}")
        try:
            value = float(value)
        except OverflowError:
            raise error(f"{name} must be a finite number, got {shown(value)}") from None
    if not abs(value) < float("inf"):
        raise error(f"{name} must be a finite number, got {value}")
    return value


def flag(name: str, value: object, error: Error = WorkloadError) -> bool:
    """True or False, and nothing else that Python would take for one of them.

    Raises:
        FlashgenError: of the class `error`, where it is neither.
    """
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(f"{name} must be True or False, got {shown(value)}")


def text(name: str, value: object, error: Error = WorkloadError, most: int | None = None) -> str:
    """A text of at most `most` characters.

    Raises:
        FlashgenError: of the class `error`, where it is none, or a longer one.
    """
    if not isinstance(value, str):
        raise error(f"{name} must be text, got {shown(value)}")
    if most is not None and len(value) > most:
        raise error(f"{name} must have at most {most} characters, got {len(value)}: {shown(value)}")
    return value


def items(name: str, value: object, error: Error = WorkloadError) -> tuple[object, ...]:
    """The items of a list, or of anything else that has some, but text.

    Raises:
        FlashgenError: of the class `error`, where it has none.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise error(f"{name} must be a list, got {shown(value)}")
    try:
        return tuple(value)
    except TypeError:  # a tensor without dimensions says that it has items
        raise error(f"{name} must be a list, got {shown(value)}") from None


def is_name_in(value: object, names: Iterable[str]) -> bool:
    """Whether a value is one of these names; what is no text is none of them, whatever its class does when compared."""
    return isinstance(value, str) and value in names


def instance(name: str, value: object, kind: type[T], error: Error = WorkloadError) -> T:
    """A value of a class of ours.

    Raises:
        FlashgenError: of the class `error`, where it is none.
    """
    if not isinstance(value, kind):
        raise error(f"{name} must be a {kind.__name__}, got {shown(value)}")
    return value
