"""Text that others wrote, as terminals and messages get it: escaped, short, and never acted on."""

from __future__ import annotations

from typing import Any

MAX_QUOTED = 80
"""Characters of a value in a message."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with an escape such as `\x1b` for every character that a terminal would act on or not show.

    `lines` leaves line breaks and tabs as they are.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


def plural(count: float, noun: str, many: str = "") -> str:
    """A whole number with its noun, such as `2 elements`; `many` is a plural that is not the noun with an s."""
    return f"{int(count)} {noun if count == 1 else many or f'{noun}s'}"


def shown(value: object) -> str:
    """A value nobody vouches for as a message quotes it: its type where that says more, at most a line, never an error.

    Aliases in a YAML file make a value of a kilobyte whose `repr` has no end, Python refuses to write an integer of
    5000 digits, and the text of a tensor waits for its GPU.
    """
    if isinstance(value, (str, bytes)):
        return printable(repr(value[:MAX_QUOTED])) + ("..." if len(value) > MAX_QUOTED else "")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if hasattr(type(value), "dtype"):
        return _array(value)
    return _other(value)


def _array(value: Any) -> str:
    name = type(value).__name__
    try:
        return f"a {name} of shape {tuple(value.shape)} in {value.dtype}"
    except Exception:  # noqa: BLE001 - nested tensors have no shape, and other people's arrays may have anything
        return f"a {name}"


def _other(value: object) -> str:
    import reprlib

    short = reprlib.Repr()
    short.maxlevel = 2
    try:
        text = short.repr(value)
    except Exception:  # noqa: BLE001 - a message about a wrong value must not fail for what its class does
        return f"a {type(value).__name__}"
    return printable(text[:MAX_QUOTED]) + ("..." if len(text) > MAX_QUOTED else "")
