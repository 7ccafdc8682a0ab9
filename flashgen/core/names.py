"""What an error says beside a name that nothing has: the one that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

LIKENESS = 0.6
"""Share of two names that must agree (`difflib`): one typing error in a short name, several in a long one."""

SHORTEST_BEGINNING = 3
"""Letters from which on the beginning of a name stands for it: a token such as `d` begins too many."""


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean causal?` for the known name most like `name`, else the first that begins so, else nothing."""
    import difflib  # every import of flashgen would pay for it, and few programs misspell

    by_text = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_text, n=1, cutoff=LIKENESS) or _begun(name.lower(), by_text)
    return f"; did you mean {by_text[found[0]]}?" if found else ""


def _begun(name: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with `name`: llama for llama-3.1-8b, which is too long to be like it."""
    return [each for each in known if len(name) >= SHORTEST_BEGINNING and each.startswith(name)]
