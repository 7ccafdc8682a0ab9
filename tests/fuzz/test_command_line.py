"""Whatever stands behind an option: a command ends with an exit code of its own, and a line says which rule broke."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from flashgen.cli.main import app
from flashgen.db import layers
from tests.cli import conftest as cli

no_gpu = cli.no_gpu

SHAPE = "b1-h4-s64-d64-varlen"
"""No family serves it, so that a right command ends soon, too."""

FILE = "b.sqlite3"
"""No such file."""

TUNE = ("tune", "--shape", SHAPE, "--dry-run", "--target", "h100")
BASES: dict[str, tuple[str, ...]] = {
    "tune": TUNE,
    "render": ("render", SHAPE, "--target", "h100"),
    "compile": ("compile", SHAPE, "--target", "h100"),
    "explain": ("explain", SHAPE, "--target", "h100"),
    "list": ("db", "list"),
    "show": ("db", "show", SHAPE),
    "history": ("db", "history", SHAPE),
    "prune": ("db", "prune", "--history"),
    "export": ("db", "export"),
    "import": ("db", "import"),
    "verify": ("db", "verify"),
    "diff": ("db", "diff", "a.sqlite3", FILE),
    "merge": ("db", "merge", "a.sqlite3", FILE, "--no-measure", "--output", "c.sqlite3"),
    "package": ("db", "package", "records", FILE),
    "report": ("report", FILE, "--output", "page.html"),
    "trials": ("db", "trials"),
    "learn": ("db", "learn", "table.jsonl.gz"),
}
WRONG = (
    *(
        "",
        "-1",
        "1.5",
        "nan",
        "9" * 5000,
        "0/0",
        "٣",
        "\x1b[31m",
        "[red]",
        "~nosuchuser/x",
        "/dev/zero",
        "a\0b",
        "\udc80",
    ),
    *("--", "portable_forward:block_m=" + "9" * 5000, "fwd-bf16-d64", "b1-h4-hk0-s64-d64"),
)


TRIED = 3 if "FUZZ_CASES" not in os.environ else len(WRONG)
"""Of each option; every value is tried of dozens of options, and `make fuzz` tries all of all."""

SEED = int(os.environ.get("FUZZ_SEED", "1"))


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The commands by their names, those of groups, too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield name, command


COMMANDS = dict(commands(typer.main.get_command(app)))
CASES = [
    (name, option.opts[0] if option.param_type_name == "option" else "")
    for name in BASES
    for option in COMMANDS[name].params
    if option.param_type_name == "argument" or not option.is_flag
]


def test_every_command_that_takes_text_is_asked() -> None:
    assert COMMANDS.keys() - BASES.keys() == {"devices", "doctor"}


@pytest.fixture(autouse=True)
def machine(no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layers, "shipped", lambda folder: tmp_path)


@pytest.mark.parametrize(("name", "option"), CASES, ids=lambda part: part)
def test_a_wrong_value_is_an_error_in_words(name: str, option: str) -> None:
    for value in random.Random(f"{SEED} {name} {option}").sample(WRONG, min(len(WRONG), TRIED)):
        line = (*BASES[name], option, value) if option else _in_place(name, value)
        result = CliRunner().invoke(app, line, color=True)
        assert result.exception is None or isinstance(result.exception, SystemExit), (value, result.exception)
        assert result.exit_code in (0, 1, 2), (value, result.stderr)
        printed = (result.stdout + result.stderr).replace("\n", "")
        assert len(printed) < 20_000 or result.exit_code == 0, value
        assert printed.isprintable() or name == "render", (value, printed)


def _in_place(name: str, value: str) -> tuple[str, ...]:
    """A command with another argument; what begins like an option is behind a `--`."""
    words = [word for word in BASES[name] if word not in (SHAPE, FILE)]
    return (*words, "--", value)
