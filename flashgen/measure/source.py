"""Which source a measurement is of: flashgen's version with the commit of the checkout that it runs from."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from flashgen._version import __version__

PACKAGE = Path(__file__).resolve().parents[1]

SOURCES = ("flashgen", "templates")
"""What decides about kernels and how they are measured, from the root of a checkout."""

PATIENCE_S = 10.0


@functools.lru_cache(maxsize=1)
def version_of_source(package: Path = PACKAGE) -> str:
    """The version with the commit as its local part (PEP 440), e.g. `0.1.0+g801eb5f1c2d3`; `.dirty` where files differ.

    It is the version alone where the commit is not known: of an installed package, and without git.
    """
    root = package.parent
    try:
        # fails in the checkout around another project's venv
        _git(root, "ls-files", "--error-unmatch", f"{package.name}/__init__.py")
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *SOURCES)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+g{commit}{'.dirty' if changed else ''}"


def _git(root: Path, *arguments: str) -> str:
    asked = ["git", "-C", str(root), *arguments]
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout.strip()
