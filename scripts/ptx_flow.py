"""What may have happened on the way to each line of a kernel in PTX, along all branches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_TABLE = re.compile(r"^\s*(?P<name>\$?\w+):\s*\.branchtargets(?P<labels>[^;]*);", re.MULTILINE)
_LABEL = re.compile(r"^(?P<name>\$?\w+):$")
_BRANCH = re.compile(r"^(?P<condition>@!?%\w+\s+)?(bra(\.uni)?|brx\.idx(\.uni)?\s+%\w+\s*,)\s+(?P<to>\$?\w+)\s*;")
_END = re.compile(r"^(ret|exit|trap)\s*;")

Facts = frozenset[tuple[str, str]]
"""What has happened: kinds of it, each with a place."""

Step = Callable[[Facts, str], Facts]
"""What has happened behind a line, from what had in front of it."""


@dataclass(slots=True)
class _Block:
    lines: list[str] = field(default_factory=list)
    followers: list[str] = field(default_factory=list)


def visit(ptx: str, step: Step) -> None:
    """Have `step` see each line with all that may have happened in front of it: a line in a loop several times."""
    blocks = _blocks(ptx)
    before: dict[str, Facts] = {"": frozenset()}
    due = [""]
    while due:
        name = due.pop()
        facts = before[name]
        for line in blocks[name].lines:
            facts = step(facts, line)
        for follower in blocks[name].followers:
            known = before.get(follower)
            if known is None or not facts <= known:
                before[follower] = facts | (known or frozenset())
                due.append(follower)


def _blocks(ptx: str) -> dict[str, _Block]:
    """Lines up to the next branch or label, by label or number; "" is the first. Inline assembly is not taken apart."""
    tables = {match["name"]: re.findall(r"\$?\w+", match["labels"]) for match in _TABLE.finditer(ptx)}
    block = _Block()
    blocks, goes_on, depth = {"": block}, True, 0
    for line in _TABLE.sub("", ptx).splitlines():
        text = line.split("//")[0].strip()
        # a kernel is one pair of braces, and each instruction of inline assembly has a pair of its own in it
        label, branch = (_LABEL.match(text), _BRANCH.match(text)) if depth <= 1 else (None, None)
        if label:
            block.followers += [label["name"]] if goes_on else []
            block = blocks[label["name"]] = _Block()
            goes_on = True
        elif goes_on:
            block.lines.append(text)
            goes_on = not _END.match(text)
        if branch and goes_on:
            block.followers += tables.get(branch["to"], [branch["to"]])
            goes_on = branch["condition"] is not None
            if goes_on:
                following = f"behind {len(blocks)}"
                block.followers.append(following)
                block = blocks[following] = _Block()
        depth += text.count("{") - text.count("}")
    return blocks
