"""The program that Nsight Compute counts for `benchmarks.io`; it is of no use by itself.

    ncu ... python -m benchmarks.io_worker CASES REPORT

CASES has a line a case. Each is called twice to warm up, then once between two sweeps over memory, and these three are
what the profiler sees. The first sweep fills L2 with what the call does not need, so that the call begins as in a model
that did something else in between; the second one pushes what the call wrote out to HBM, where it would go in the end.
REPORT gets a line a case, with the reason if it was not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from benchmarks.impls import Call
from benchmarks.io_cases import Case, prepare
from flashgen.core.errors import FlashgenError
from flashgen.launch.gpu import current_device

WARM_CALLS = 2
SWEEP_BYTES = 512 * 2**20
"""Several times the largest L2 there is."""

SWEEP_BLOCK = 4096
DONE = "done"


@triton.jit
def sweep_l2(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read a tensor of zeros and write nothing: no sum is negative."""
    total = tl.sum(tl.load(x + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)))
    tl.store(out, total, mask=total < 0)


class Profiler(Protocol):
    """What surrounds a call that is counted."""

    def start(self) -> None:
        """Count kernels from here on."""
        ...

    def stop(self) -> None:
        """Wait for all kernels and count no more."""
        ...

    def sweep(self) -> None:
        """Replace everything in L2 by what nobody needs, and write back what was changed."""
        ...


class CudaProfiler:
    """The profiler that this process was started under."""

    def __init__(self, where: torch.device) -> None:
        self._junk = torch.zeros(SWEEP_BYTES // 4, device=where)
        self._out = torch.zeros(1, device=where)
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Count kernels from here on."""
        torch.cuda.synchronize()
        self._cudart.cudaProfilerStart()

    def stop(self) -> None:
        """Wait for all kernels and count no more."""
        torch.cuda.synchronize()
        self._cudart.cudaProfilerStop()

    def sweep(self) -> None:
        """Read more than L2 holds."""
        sweep_l2[(self._junk.numel() // SWEEP_BLOCK,)](self._junk, self._out, BLOCK=SWEEP_BLOCK)


def main(arguments: Sequence[str]) -> int:
    """Call every case; 0 is done."""
    cases, report = Path(arguments[0]), Path(arguments[1])
    device, where = current_device(), torch.device("cuda", 0)
    profiler = CudaProfiler(where)
    profiler.sweep()  # compiles it
    with report.open("w") as file, torch.no_grad():
        for case in map(Case.parse, cases.read_text().splitlines()):
            file.write(f"{case}\t{outcome(case, lambda case: prepare(case, device, where), profiler)}\n")
            file.flush()
            torch.cuda.empty_cache()
    return 0


def outcome(case: Case, prepare: Callable[[Case], Call], profiler: Profiler) -> str:
    """Call a case between two sweeps; `DONE`, or the reason why it was not counted.

    What fails once it is being counted ends the program: what belongs to which case would not be known any more.
    """
    try:
        call = prepare(case)
        with call.context():
            for _ in range(WARM_CALLS):
                call.run(0)
    except (FlashgenError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    with call.context():
        profiler.start()
        profiler.sweep()
        call.run(0)
        profiler.sweep()
        profiler.stop()
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
