"""The command as a whole: exit codes, one-line errors, help, version, and what it does not load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashgen._version import __version__
from flashgen.cli import main
from flashgen.cli.arguments import CommandLineError
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.record import Failure
from flashgen.db.store import Store
from tests.cli.conftest import ROOT, Invoke, own
from tests.db.samples import CAUSAL, FAILED, MEASURED, RTX_4090, timed
from tests.tiers import EXHAUSTIVE, first

FULL = Path("/dev/full")
FOREIGN = "\u663e\u5361"

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_version_and_help(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"flashgen {__version__}\n"
    shown = invoke("--help")
    assert shown.exit_code == 0
    for word in ("tune", "render", "compile", "explain", "devices", "doctor", "db", "130", "error: ..."):
        assert word in shown.stdout


@pytest.mark.parametrize("arguments", [["bogus"], ["render"], ["render", "b1-h1-s1-d64", "--bogus"], ["db", "bogus"]])
def test_wrong_usage_is_exit_code_2(invoke: Invoke, arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=main.Commands)

    @app.callback()
    def options() -> None:
        pass

    @app.command()
    def work() -> None:
        raise error

    return app


def test_an_error_of_ours_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(raising(DatabaseError("a rule,\n  then the value")), ["work"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: a rule, then the value\n"


def test_a_wrong_command_line_is_one_line_and_exit_code_2() -> None:
    result = CliRunner().invoke(raising(CommandLineError("a rule,\n  then the value")), ["work"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: a rule, then the value\n")


def test_a_missing_package_is_named_and_a_missing_module_of_ours_is_a_defect() -> None:
    result = CliRunner().invoke(raising(ModuleNotFoundError("no", name="torch.cuda")), ["work"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: this needs the package torch, which is missing (see `flashgen doctor`)\n"
    result = CliRunner().invoke(raising(ModuleNotFoundError("no", name="flashgen.nothing")), ["work"])
    assert isinstance(result.exception, ModuleNotFoundError)


def test_an_interrupt_is_exit_code_130() -> None:
    result = CliRunner().invoke(raising(KeyboardInterrupt()), ["work"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_defect_keeps_its_traceback() -> None:
    result = CliRunner().invoke(raising(ZeroDivisionError("a defect")), ["work"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert not isinstance(result.exception, FlashgenError)


def test_a_real_process_prints_one_line(command: Run) -> None:
    result = command("render", "b4-h32-s4096-d128-nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: a shape is made of the tokens")
    assert result.stderr.count("\n") == 1


def test_a_warning_is_one_line(command: Run, tuned: object) -> None:
    from flashgen.core.settings import settings

    path = settings().db_layers[0]
    path.write_bytes(b"not a database " * 500)
    result = command("db", "list", "--json")
    assert result.returncode == 0
    assert own(result.stdout) == []  # and nothing but JSON on that stream
    assert result.stderr.startswith(f"warning: tuning database {path} is not used: ")
    assert result.stderr.count("\n") == 1


@pytest.fixture
def foreign(tuned: Path) -> Path:
    """The user database with a record and a trial of a GPU with a foreign name."""
    device = replace(RTX_4090, name=FOREIGN, num_sms=76)
    with Store.open(tuned) as store:
        store.put_record(replace(timed(MEASURED, 20.0), device=device))
        store.put_trial(replace(FAILED, device=device, outcome=Failure(stage="build", reason=FOREIGN)))
    return tuned


def test_a_warning_comes_once_however_often_a_database_is_opened(
    foreign: Path, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is not in the catalogue is looked for in all databases before the command opens them."""
    broken = tmp_path / "broken.sqlite3"
    broken.write_text("no database")
    monkeypatch.setenv("FLASHGEN_DB", f"{foreign}{os.pathsep}{broken}")
    result = command("db", "list", "--device", FOREIGN)
    assert result.returncode == 0
    assert result.stderr.count("warning: ") == 1


@pytest.mark.parametrize("arguments", first(1, ["trials --csv", "list", f"show {CAUSAL.key}"]))
def test_characters_that_the_output_cannot_encode_are_escaped(
    foreign: Path, command: Run, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    result = command("db", *arguments.split(), "--device", FOREIGN)
    assert (result.returncode, result.stderr) == (0, "")
    assert r"\u663e\u5361" in result.stdout


def test_ctrl_c_ends_a_process_with_130() -> None:
    script = """
import signal, sys, threading, time
from flashgen.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
@main.app.command()
def wait():
    print("waiting", flush=True)
    time.sleep(60)
sys.argv = ["flashgen", "wait"]
main.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


@EXHAUSTIVE
def test_a_pipe_that_closes_early_is_no_traceback() -> None:
    line = f"{sys.executable} -m flashgen devices --json | head -n 1"
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "[\n"
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full here")
@pytest.mark.parametrize("argument", first(1, ["--version", "devices"]))
def test_a_disk_that_is_full_is_an_error_in_one_line(argument: str) -> None:
    line = [sys.executable, "-m", "flashgen", argument]
    with FULL.open("w") as stdout:
        result = subprocess.run(
            line, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert result.returncode == 1
    assert result.stderr.startswith("error: the system must do what it is asked to: ")
    assert result.stderr.count("\n") == 1


@EXHAUSTIVE
def test_an_output_that_is_closed_is_no_traceback() -> None:
    line = f"{sys.executable} -m flashgen devices >&-"
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0


def test_help_loads_nothing_that_only_commands_need() -> None:
    script = """
import sys
import flashgen
before = set(sys.modules)
from flashgen.cli import main
sys.argv = ["flashgen", "--help"]
try:
    main.main()
except SystemExit:
    pass
heavy = {"sqlalchemy", "alembic", "optuna", "jinja2", "triton", "torch", "yaml"} & (set(sys.modules) - before)
assert not heavy, heavy
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
