"""Tables for terminals and pipes; text of strangers stays text."""

from __future__ import annotations

import sys

import pytest

from flashgen.cli import output

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


def test_a_terminal_gets_the_same_cells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    key = "fwd-bf16-b4-h32-hk8-sq4096-sk4096-d128-causal-" + "softcap" * 20
    output.print_table(COLUMNS, [*ROWS, (key, 1)])
    shown = capsys.readouterr().out
    assert "[link=x]second[/link]" in shown
    assert "1.235" in shown
    assert key in shown  # in one piece, to be copied


def test_no_rows_print_the_header(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(COLUMNS, [])
    assert capsys.readouterr().out == "name  ms\n"
