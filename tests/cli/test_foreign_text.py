"""Names, paths and files of others are printed as text: no escape reaches a terminal, and markup stays what it is."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli import output
from flashgen.cli.display import Panel, PlainLines
from flashgen.cli.main import app
from flashgen.core.device import find_device
from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.core.quoting import printable, shown
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.tuning.events import RunStarted, Warned

RED, TITLE, BACKWARDS = "\x1b[31m", "\x1b]0;x\x07", "\u202e"
HOSTILE = f"{RED}{TITLE}{BACKWARDS}\r\x9b2J[red]x[/red]"
ESCAPED = r"\x1b[31m\x1b]0;x\x07\u202e\r\x9b2J[red]x[/red]"

YAML = r'"\e[31mgroup": {common: {}, workloads: ["\e]0;x\a"]}'


def test_what_steers_a_terminal_is_escaped() -> None:
    assert printable(HOSTILE) == ESCAPED
    assert printable(ESCAPED) == ESCAPED
    assert printable("é ß 漢字 ✓") == "é ß 漢字 ✓"
    assert printable("a\nb\tc\udc80") == r"a\nb\tc\udc80"
    assert printable("a\nb\r", lines=True) == "a\nb\\r"
    assert str(FlashgenError(HOSTILE)) == ESCAPED


def test_a_quoted_value_is_short_and_never_an_error() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    bomb: list[object] = []
    for _ in range(64):
        bomb = [bomb, bomb]
    for value in (bomb, Broken(), 10**6000, -(10**6000), "x" * 10**6, HOSTILE, {HOSTILE: HOSTILE}, b"\x1b" * 999):
        text = shown(value)
        assert len(text) < 600
        assert text.isprintable()


@pytest.mark.parametrize("terminal", [False, True])
def test_tables_and_fields_show_escapes(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    output.print_table(("name", "ms"), [(HOSTILE, 1.0)])
    output.print_fields([(HOSTILE, HOSTILE)])
    output.note(HOSTILE)
    found = capsys.readouterr()
    assert found.out.count(ESCAPED) == 3
    assert found.err == f"note: {ESCAPED}\n"
    assert not set(found.out) & {"\x1b", "\r", "\x07", BACKWARDS} - (
        {"\x1b"} if terminal else set()
    )  # rich writes bold


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", f"b1-h1-s64-d64-{HOSTILE}"),
        ("explain", "b1-h1-s64-d64", "--target", HOSTILE),
        ("render", "b1-h1-s64-d64", "--config", f"portable_forward:{HOSTILE}=1", "--target", "h100"),
        ("render", "b1-h1-s64-d64", "--family", HOSTILE, "--target", "h100"),
        ("tune", "--model", HOSTILE),
        ("tune", "--file", f"/nowhere/{HOSTILE}"),
        ("tune", "--shape", "b1-h1-s64-d64", "--budget", HOSTILE),
        ("tune", "--shape", "b1-h1-s64-d64", "--shard", HOSTILE),
        ("db", "import", f"/nowhere/{HOSTILE}"),
        ("db", "list", "--provenance", HOSTILE),
        ("db", "list", HOSTILE),
        (f"--{HOSTILE}",),
        ("db", f"--{HOSTILE}"),
        (HOSTILE,),
    ],
    ids=lambda arguments: " ".join(arguments[:3]).encode("unicode_escape").decode()[:40],
)
def test_errors_of_commands_show_escapes(arguments: tuple[str, ...], no_gpu: None) -> None:
    result = CliRunner().invoke(app, arguments, color=True)
    assert result.exit_code in (1, 2)
    printed = result.stdout + result.stderr
    assert r"\x1b[31m" in printed
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed)


def test_keys_and_values_of_files_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(YAML)
    result = CliRunner().invoke(app, ["tune", "--file", str(path)], color=True)
    assert result.exit_code == 2
    assert r"\x1b[31mgroup: entry 1" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_database_with_a_hostile_name_is_named_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    path = tmp_path / f"{RED}x.sqlite3"
    path.write_text("no database")
    monkeypatch.setenv("FLASHGEN_DB", str(path))
    settings.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = CliRunner().invoke(app, ["db", "list"], color=True)
    assert "\x1b" not in result.stdout + result.stderr
    assert len(caught) == 1
    assert r"\x1b[31mx.sqlite3" in str(caught[0].message)
    assert "\x1b" not in str(caught[0].message)


@pytest.mark.parametrize("make", [PlainLines, Panel])
def test_names_and_messages_of_a_run_are_text(
    make: type[PlainLines | Panel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    device = replace(find_device("h100"), name=HOSTILE)
    with make() as show:
        show(RunStarted(device=device, workloads=(Workload.parse("b1-h1-s64-d64"),), measured=True))
        show(Warned(message=HOSTILE))
    out = capsys.readouterr().out
    assert out.count(ESCAPED) >= 2
    assert RED not in out
    assert TITLE not in out


def printing_lines(path: Path) -> list[str]:
    """The lines of a module on which a call that prints begins; examples in docstrings are none."""
    source = path.read_text()
    if not re.search(r"\b(echo|print|write)\b", source):
        return []
    lines = source.splitlines()
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    pattern = re.compile(r"(typer\.echo|.*console\.print|print|.*std(err|out)\.write)")
    return [lines[c.lineno - 1].strip() for c in calls if pattern.fullmatch(ast.unparse(c.func))]


def test_text_is_printed_in_one_place_alone() -> None:
    root = Path(output.__file__).parents[1]
    paths = (path for path in root.rglob("*.py") if path.name != "output.py")
    found = {(path.relative_to(root).as_posix(), line) for path in paths for line in printing_lines(path)}
    assert found == {
        (
            "cli/kernels.py",
            "typer.echo(render_standalone(spec, chosen).text, nl=False)",
        ),  # rendered from checked values
        ("cli/display.py", 'sys.stdout.write(to_json(event) + "\\n")'),  # JSON in ASCII
        ("cli/display_many.py", 'sys.stdout.write(to_json(event, station=station) + "\\n")'),
        ("cli/tune_calls.py", 'sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\\n")'),
        ("cli/display.py", "self._console.print(printable(line), markup=False, highlight=False)"),
        (
            "cli/display_many.py",
            "self._bar.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)",
        ),
    }


def test_errors_of_calls_are_escaped_as_well() -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.parse(f"b1-h1-s8-d64-{HOSTILE}")
    assert printable(str(caught.value)) == str(caught.value)
