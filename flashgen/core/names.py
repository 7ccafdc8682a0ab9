"""What an error says beside a name that nothing has: the one that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

LIKENESS = 0.6
"""Share of two names that must agree (`difflib`): one typing error in a short name, several in a long one."""


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean causal?` for the known name most like `name`, and nothing if none is like it."""
    import difflib  # every import of flashgen would pay for it, and few programs misspell

    by_text = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_text, n=1, cutoff=LIKENESS)
    return f"; did you mean {by_text[found[0]]}?" if found else ""
