"""`flashgen`: the command, its groups, and how errors become exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from flashgen._version import __version__
from flashgen.cli import db, kernels, machine, output
from flashgen.cli.arguments import CommandLineError
from flashgen.cli.doctor import doctor
from flashgen.cli.report import report
from flashgen.cli.tune import tune
from flashgen.core.errors import FlashgenError
from flashgen.core.quoting import printable

EXIT_CODES = (
    "Exit codes: 0 done; 1 an error, printed as one line `error: ...`; 2 wrong usage; 3 tuning ended but some "
    "workloads have no valid candidate; 130 interrupted, what was found is saved."
)


class Commands(TyperGroup):
    """A group in which an error of ours is one line on stderr and not a traceback."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """Read the options before the command.

        Raises:
            typer.Exit: with code 1 where what they print cannot be written.
        """
        with _escaped(), _of_the_system():
            found = super().make_context(*arguments, **named)
        return found

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command.

        Raises:
            typer.Exit: with code 2 for a wrong command line, 1 for another error of flashgen, 130 for Ctrl-C.
        """
        try:
            with _escaped(), _of_the_system():
                return super().invoke(ctx)
        except CommandLineError as error:
            raise _exit(2, str(error)) from error
        except FlashgenError as error:
            raise _exit(1, str(error)) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package in ("", "flashgen"):
                raise
            raise _exit(1, f"this needs the package {package}, which is missing (see `flashgen doctor`)") from error
        except KeyboardInterrupt as error:
            output.say("interrupted", err=True)
            raise typer.Exit(130) from error


@contextlib.contextmanager
def _escaped() -> Iterator[None]:
    """What typer says of a wrong command line quotes it; its text is escaped like that of errors of ours."""
    try:
        yield
    except _UsageError as error:
        error.message = printable(error.message, lines=True)
        raise


@contextlib.contextmanager
def _of_the_system() -> Iterator[None]:
    """What the system refuses is an error in one line as well: a full disk behind `> file` is no fault of ours.

    Raises:
        typer.Exit: with code 1; a pipe that nobody reads any more is typer's, which ends without a word.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        with contextlib.suppress(OSError):
            sys.stdout.close()  # what it still holds would fail again at the end of the process
        raise _exit(1, f"the system must do what it is asked to: {error}") from error


_UsageError: Any = typer.BadParameter.__bases__[0]  # which typer does not name


def _exit(code: int, message: str) -> typer.Exit:
    """Print an error in one line; the exit with this code, to be raised."""
    output.say(f"error: {' '.join(message.split())}", err=True)
    return typer.Exit(code)


app = typer.Typer(
    name="flashgen",
    cls=Commands,
    help="Tune, inspect and share FlashAttention kernels that are generated for your shapes and your GPU.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes cut words that are too long for a column, and break paragraphs where the source does
    pretty_exceptions_enable=False,
)
app.command(short_help="Search the fastest kernel of each workload and store it.")(tune)
app.command(short_help="Print a kernel as source that runs without flashgen.")(kernels.render)
app.command(name="compile", short_help="Compile a config for any GPU; print what it takes.")(kernels.compile_)
app.command(help=kernels.EXPLAIN_HELP, short_help="Say which config serves a workload, and why.")(kernels.explain)
app.command(short_help="Write what databases know to one HTML page.")(report)
app.command(short_help="List the GPUs that --target names.")(machine.devices)
app.command(short_help="Say what is missing or wrong on this machine.")(doctor)
app.add_typer(db.app, name="db", short_help="List, share, compare and verify tuned records.")


def _print_version(wanted: bool) -> None:
    if wanted:
        output.say(f"flashgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """The entry point of the installed command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):  # names of others have characters that an encoding may lack
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    app(prog_name="flashgen")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line for people; where in flashgen it was raised does not help them."""
    _warn_once(" ".join(str(message).split()))


@functools.cache
def _warn_once(message: str) -> None:
    """A command may open the same database several times; the filters of `warnings` forget when another is added."""
    output.say(f"warning: {message}", err=True)
