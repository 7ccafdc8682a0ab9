"""The command `flashgen` with a GPU and a compiler that are fakes: `python -m tests.cli.fake_command`."""

from __future__ import annotations

import contextlib

from flashgen.cli import tune
from flashgen.cli.main import main
from tests.tuning.fakes import FakeCompiler, FakeExecutor

if __name__ == "__main__":
    tune.make_executor = lambda index: FakeExecutor()
    tune.make_compiler = lambda device, jobs: contextlib.nullcontext(FakeCompiler(failing=0, spilling=0))
    main()
