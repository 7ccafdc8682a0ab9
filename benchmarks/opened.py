"""What every benchmark begins with: the machine and the commit, the file that its rows go into, and wrong arguments."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.provenance import Provenance
from benchmarks.results import COLUMNS, ResultsFile
from flashgen.core.errors import FlashgenError


@contextlib.contextmanager
def usage_of(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the process, as for an unknown option, where something inside refuses what was asked for."""
    try:
        yield
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))


def opened(options: argparse.Namespace, name: str, columns: Sequence[str] = COLUMNS) -> tuple[Provenance, ResultsFile]:
    """This process's GPU and commit, and the file that is begun or, with `--append`, gone on with.

    Args:
        options: those of `provenance.add_arguments`.
        name: of the file, without its ending.
        columns: of its rows.

    Raises:
        DeviceError: torch sees no GPU.
        ValueError: the commit is not known, or the file cannot be gone on with.
    """
    provenance = Provenance.here(options.commit)
    path = options.results / provenance.slug / f"{name}.csv"
    return provenance, ResultsFile(path, columns, append=options.append, commit=provenance.commit)
