"""Blocks of a tutorial: what they are, and running them in order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from flashgen.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs/tutorials").glob("*.md") if path.name != "README.md")
BLOCK = re.compile(r"(?:^(<!-- gpu -->)\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("pip install ", "python -m build ", "make ")
"""Commands that need a network or a checkout: other tests run what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; `text` is what the commands before it print."""

    language: str
    text: str
    needs_gpu: bool


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(needs_gpu=bool(match[1]), language=match[2], text=match[3]) for match in found]


def run(page: Path, *, with_gpu: bool, setenv: Callable[[str, str], None]) -> int:
    """Run the blocks of a page in order, in the present folder; returns how many were run."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed, count = "", 0
    for block in blocks(page):
        if block.needs_gpu and not with_gpu:
            continue
        count += 1
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), namespace)
        elif block.language == "bash":
            printed = "".join(command(line, setenv) for line in block.text.splitlines())
        else:
            assert block.language == "text", f"{page.name} has a block in {block.language!r}"
            for line in block.text.splitlines():
                assert line in printed, f"{page.name}: {line!r} is not in\n{printed}"
    return count


def command(line: str, setenv: Callable[[str, str], None]) -> str:
    """What a line of a shell prints."""
    words = shlex.split(line, comments=True)
    if not words or line.startswith(NOT_RUN):
        return ""
    if words[0] == "export":
        setenv(*words[1].split("=", 1))
        return ""
    assert words[0] == "flashgen", line
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    return done.stdout
