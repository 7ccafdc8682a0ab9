"""Tables for terminals and pipes; text of strangers stays text."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
import pytest

from flashgen.cli import db, output
from flashgen.db.layers import Layers

COLUMNS = ("name", "ms")
ROWS = [("first", 1.23456), ("[link=x]second[/link]", None), ("third", 1234567.0)]


def test_a_pipe_gets_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "name                        ms",
        "first                    1.235",
        "[link=x]second[/link]        -",
        "third                  1234567",
    ]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the standard output a terminal of so many columns."""

    def use(width: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))

    return use


def test_a_terminal_gets_the_same_cells(capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None]) -> None:
    terminal(80)
    output.print_table(COLUMNS, ROWS)
    assert click.unstyle(capsys.readouterr().out).splitlines() == [
        "name                        ms",
        "first                    1.235",
        "[link=x]second[/link]        -",
        "third                  1234567",
    ]


WIDE = ("workload", "pass", "config", "ms", "source")
WIDE_ROWS = [
    ("fwd-bf16-b4-h32-hk8-sq4096-sk4096-d128-causal", "forward", "block_m=128 loads=pointer", 1.25, "measured"),
    ("fwd-bf16-b4-h32-hk8-sq8192-sk8192-d128-causal", "forward", "block_m=64 loads=descriptor", None, "predicted"),
]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            110,
            [
                "workload                                       pass     config                         ms  source",
                f"{WIDE_ROWS[0][0]}  forward  block_m=128 loads=pointer    1.25  measured",
                f"{WIDE_ROWS[1][0]}  forward  block_m=64 loads=descriptor     -  predicted",
            ],
        ),
        (
            60,
            [
                "workload",
                "  pass     config                         ms  source",
                WIDE_ROWS[0][0],
                "  forward  block_m=128 loads=pointer    1.25  measured",
                WIDE_ROWS[1][0],
                "  forward  block_m=64 loads=descriptor     -  predicted",
            ],
        ),
        (
            30,
            [
                "workload",
                "  pass       ms  source",
                WIDE_ROWS[0][0],  # in one piece, to be copied
                "  forward  1.25  measured",
                "  config: block_m=128",
                "    loads=pointer",
                WIDE_ROWS[1][0],
                "  forward     -  predicted",
                "  config: block_m=64",
                "    loads=descriptor",
            ],
        ),
    ],
)
def test_a_table_folds_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None], width: int, lines: list[str]
) -> None:
    terminal(width)
    output.print_table(WIDE, WIDE_ROWS)
    assert click.unstyle(capsys.readouterr().out).splitlines() == lines


def test_every_shipped_record_is_listed_within_80_columns(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None]
) -> None:
    terminal(80)
    db.list_()
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert len(lines) > 500
    with Layers.open() as layers:
        keys = {record.workload.key for record, _ in layers.records()}
    assert {line for line in lines if len(line) > 80} == {key for key in keys if len(key) > 80}, "a key is never cut"


LOSSES = ("workload", "what failed", "ms", "", "reason")
HARD_ROWS = [
    ("fwd-bf16-b4-h32-hk8-sq4096-sk4096-d128-causal", "two  spaces, and a word of 70: " + 70 * "x", 1.5, "", None),
    ("[bold]not markup[/bold]", "größer 東京 \x1b[31m\n", 123456.0, "*", "no family; " * 12),
]


@pytest.mark.parametrize("width", [20, 60, 80, 200, None])
def test_no_width_loses_a_cell(
    capsys: pytest.CaptureFixture[str], terminal: Callable[[int], None], width: int | None
) -> None:
    if width is not None:
        terminal(width)
    output.print_table(LOSSES, HARD_ROWS)
    shown = "".join(click.unstyle(capsys.readouterr().out).split())
    for cell in (*LOSSES, *(output.text(cell) for row in HARD_ROWS for cell in row)):
        assert "".join(cell.split()) in shown, cell
    assert r"\x1b[31m\n" in shown


def test_no_rows_print_the_header(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(COLUMNS, [])
    assert capsys.readouterr().out == "name  ms\n"
