"""The command `flashgen` with a GPU and a compiler that are fakes: `python -m tests.cli.fake_command`.

No table ships for it: to read and learn them all takes a process longer than everything else that it does.
"""

from __future__ import annotations

import contextlib

from flashgen.cli.main import main
from flashgen.tuning import known_searches, runs
from tests.tuning.fakes import FakeCompiler, FakeExecutor

if __name__ == "__main__":
    runs.make_executor = lambda index: FakeExecutor()
    runs.make_compiler = lambda device, jobs: contextlib.nullcontext(FakeCompiler(failing=0, spilling=0))
    known_searches.shipped_tables = list
    main()
