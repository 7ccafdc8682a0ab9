"""Ruff on rendered kernels, whatever this repository's own settings are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FORMAT = ("format", "--line-length", "120", "--check")
"""Whether the files read as if a careful person wrote them: it has nothing to say."""


def assert_passes(folder: Path, *command: str) -> None:
    """Run a command of ruff on all files of a folder, and fail with what it prints."""
    ruff = shutil.which("ruff") or str(Path(sys.executable).parent / "ruff")
    whole = [ruff, command[0], "--isolated", *command[1:], str(folder)]
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
