"""Rules of single values that many arguments share; each refusal says the rule and then the value.

What is returned is a plain Python value: numpy's numbers are taken, and left behind.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.core.quoting import shown

T = TypeVar("T")
Error = type[FlashgenError]

MAX_INTEGER = 2**63 - 1
"""What fits into an integer of a database, and of torch."""

LEAST_MS, MOST_MS = 1e-9, 1e9
"""Of a time that a kernel can take, so that ratios, means and products of times are numbers: 1 ps, and eleven days."""

TIMES = f"times are from {LEAST_MS:g} to {MOST_MS:g} ms"
"""The rule in words."""

MAX_SIZE = 2**31 - 1
"""Of a batch, a number of heads, a length: kernels count in 32 bits."""


def whole_number(
    name: str, value: object, least: int | None, most: int | None = MAX_SIZE, error: Error = WorkloadError
) -> int:
    """A whole number within these limits, inclusive; None is no limit. A symbolic one stays as it is.

    Raises:
        FlashgenError: of the class `error`, where it is none.
    """
    if type(value) is not int and not is_symbolic(value):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise error(f"{name} must be a whole number, got {shown(value)}")
        value = int(value)
    number: Any = value
    if least is not None and number < least:
        raise error(f"{name} must be at least {least}, got {shown(value)}")
    if most is not None and number > most:
        raise error(f"{name} must be at most {most}, got {shown(value)}")
    found: int = number
    return found


def is_symbolic(value: object) -> bool:
    """Whether this is a whole number of a graph that torch makes, which may be another one whenever the graph runs."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.SymInt)


def real_number(name: str, value: object, error: Error = WorkloadError) -> float:
    """A number as a float, be it NaN or infinite, but neither text nor a flag.

    Raises:
        FlashgenError: of the class `error`, where it is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise error(f"{name} must be a number with a place among the floats, got {shown(value)}") from None


def are_times(times_ms: Iterable[float]) -> bool:
    """Whether all of these, in ms, are times that a kernel can take; NaN is none."""
    return all(LEAST_MS <= time_ms <= MOST_MS for time_ms in times_ms)


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
    except (RuntimeError, TypeError):  # some tensors say that they have items, and have none that can be had
        raise error(f"{name} must be a list, got {shown(value)}") from None


def torch_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor of torch's, which nobody has who has not imported it.

    Raises:
        WorkloadError: it is none.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        raise WorkloadError(f"{name} must be a tensor, got {shown(value)}")


def check_fields(value: Any, error: Error) -> None:
    """Check the fields of a frozen dataclass that are annotated as numbers, flags or texts; a module's own others.

    Raises:
        FlashgenError: of the class `error`, where a value is of another type.
    """
    for field in fields(value):
        kind, _, optional = str(field.type).partition(" | ")
        given = getattr(value, field.name)
        if kind in _PLAIN and not (given is None and optional):
            object.__setattr__(value, field.name, _PLAIN[kind](field.name, given, error))


_PLAIN: dict[str, Callable[[str, object, Error], object]] = {
    "int": lambda name, value, error: whole_number(name, value, -MAX_INTEGER, MAX_INTEGER, error),
    "float": real_number,
    "bool": flag,
    "str": text,
}


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
