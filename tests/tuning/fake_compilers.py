"""Compile services that misbehave, by the number of stages asked for; they run in processes of a real pool."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from flashgen.core.compiled import Compiled
from flashgen.core.record import Failure
from flashgen.measure.worker import Announce
from flashgen.tuning.compile_pool import CompileJob


class Misbehaving:
    """1 compiles, 2 hangs with a child that would outlive it, 3 aborts, 4 raises, 5 counts its calls in a file."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce

    def compile(self, job: CompileJob) -> Compiled | Failure:
        self._announce("build", None)
        kind = job.config.integer("num_stages")
        if kind == 2:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(str(job.config["loads"])).write_text(str(child.pid))
            time.sleep(600)
        if kind == 3:
            os.abort()
        if kind == 4:
            raise RuntimeError("planted")
        if kind == 5:
            with Path(str(job.config["loads"])).open("a") as file:
                file.write("x")
        return Compiled(registers=100, spills=0, shared_bytes=1024, occupancy=2)
