"""The command `flashgen` with a GPU and a compiler that are fakes: `python -m tests.cli.fake_command`."""

from __future__ import annotations

import contextlib

from flashgen.cli.main import main
from flashgen.tuning import runs
from tests.tuning.fakes import FakeCompiler, FakeExecutor

if __name__ == "__main__":
    runs.make_executor = lambda index: FakeExecutor()
    runs.make_compiler = lambda device, jobs: contextlib.nullcontext(FakeCompiler(failing=0, spilling=0))
    main()
