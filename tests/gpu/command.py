"""The command line in a process of its own, which finds the same GPU."""

from __future__ import annotations

import subprocess
import sys

from flashgen.core.settings import child_environment


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashgen", *arguments],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
