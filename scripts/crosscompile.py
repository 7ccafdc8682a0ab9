"""Compile every kernel family for every supported architecture with the Triton of this interpreter.

Runs in an environment with Triton and without torch (`make crosscompile` builds one for the oldest and one for the
newest Triton). One line per kernel, and one for what it spills. A family that compiles nowhere, a compile error, or a
default config of a plain shape that spills more than the row of its family allows (`default_spills`: from 24 to 280
bytes of local memory a thread, what was found under these two) ends it with exit code 1, and so does a config of which
an SM holds fewer programs than it says (`per_sm`), and a kernel that hands values to its roles where a warp may still
read something else (`role_captures.py`) or has one thread act for warps that are not ready (`role_order.py`). What
features, other loads and packed heads spill is printed, and not limited. With `--loops` the line also says how often
machine code for NVIDIA touches what it spilled (`machine_loops.py`): that costs time in a mainloop, and next to none
around it.

With `--brief` there are two kernels of each family and those with functions, some as far as Triton's own IR, which says
whether it accepts their texts (`triton_ir.py`): that is what `make test` has of both. `make crosscompile-all`, as
before a release, has machine code of all.

Which kernels these are is in `crosscompile_jobs.py` and `crosscompile_helpers.py`. No helper kernel may spill.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

from flashgen.codegen import families
from flashgen.codegen.build import CompiledKernel, compile_helper, compile_kernel
from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES
from flashgen.core.errors import BuildError
from scripts.crosscompile_helpers import HelperJob, helper_jobs
from scripts.crosscompile_jobs import TARGETS, Job, brief, few_jobs, jobs
from scripts.machine_loops import disassembled, local_accesses
from scripts.role_captures import overwritten
from scripts.role_order import hasty
from scripts.triton_ir import accept


def main() -> int:
    """Compile all jobs in as many processes as there are cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--targets", nargs="+", default=TARGETS)
    which.add_argument("--few", action="store_true", help="few shapes for each kind of target, each feature for one")
    parser.add_argument(
        "--brief", action="store_true", help="two kernels of each family, and functions as far as Triton's own IR"
    )
    parser.add_argument("--loops", action="store_true", help="also say where code for NVIDIA touches its spills")
    parser.add_argument("--family", action="append", default=[], metavar="ID", help="these families alone; repeatable")
    arguments = parser.parse_args()
    rows = [families.family(name) for name in arguments.family] or [*FAMILIES, *DECODE_FAMILIES]
    if importlib.util.find_spec("torch") is not None:
        print("note: torch is importable here, so this run does not show that compiling needs none")
    kernels = few_jobs(rows) if arguments.few else jobs(rows, arguments.targets)
    kernels = brief(kernels) if arguments.brief else kernels
    found: list[Job | HelperJob] = [*kernels]
    found += [] if arguments.family else helper_jobs()
    idle = {row.id for row in rows} - {job.config.family for job in found if isinstance(job, Job)}
    if idle:
        print(f"error: no target compiles {', '.join(sorted(idle))}")
        return 1
    spawn = multiprocessing.get_context("spawn")
    compile_job = functools.partial(compile_one, loops=arguments.loops)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=collect_seldom) as pool:
        outcomes = [report(job, *outcome) for job, outcome in zip(found, pool.map(compile_job, found), strict=True)]
    failed = outcomes.count(False)
    import triton

    to_ir = sum(isinstance(job, Job) and not job.to_machine_code for job in found)
    print(
        f"Triton {triton.__version__}: {len(outcomes) - failed} kernels compiled, {failed} failed"
        + (f"; {to_ir} as far as its own IR" if to_ir else "")
    )
    return 1 if failed else 0


def collect_seldom() -> None:
    """Syntax trees and IR are garbage only with their kernel: to search them took 6% of a compile's own time."""
    gc.set_threshold(50_000, 20, 20)


def compile_one(job: Job | HelperJob, *, loops: bool = False) -> tuple[bool, str]:
    """Compile in this process; whether that went well, and a remark, of spills with the `loops` that touch them."""
    try:
        if isinstance(job, HelperJob):
            spills = compile_helper(job.helper, job.device).spills
            return not spills, f"{spills} bytes of local memory per thread, 0 allowed" if spills else ""
        if not job.to_machine_code:
            accept(job.spec, job.config, job.device)
            return True, ""
        compiled = compile_kernel(job.spec, job.config, job.device)
    except BuildError as error:
        return False, str(error)
    wanted = job.config.get("per_sm", 1)
    if job.device.is_nvidia and wanted > 1 and compiled.main.occupancy(job.device) < wanted:
        return False, f"an SM holds {compiled.main.occupancy(job.device)} programs instead of {wanted}"
    for part in compiled.parts if job.device.is_nvidia else ():
        places = overwritten(part.handle.asm["ptx"])
        if places:
            return False, f"{part.kernel.entry} hands values to roles where warps may still read: {', '.join(places)}"
        early = hasty(part.handle.asm["ptx"])
        if early:
            return False, f"{part.kernel.entry} has one thread act for warps that are not ready: {'; '.join(early[:3])}"
    if compiled.spills == 0:
        return True, ""
    limit = families.family(job.config.family).default_spills
    allowed = "not limited" if job.may_spill else f"{limit} allowed"
    remark = f"{compiled.spills} bytes of local memory per thread, {allowed}{touched(compiled) if loops else ''}"
    return job.may_spill or compiled.spills <= limit, remark


def touched(compiled: CompiledKernel) -> str:
    """How often loops of matrix products load and store what was spilled, of a kernel for NVIDIA."""
    if not compiled.device.is_nvidia:
        return ""
    found = [local_accesses(disassembled(part.handle.asm["cubin"])) for part in compiled.parts if part.spills]
    loads, stores = (sum(each["mainloop"][kind] for each in found) for kind in (0, 1))
    return f"; {loads} loads and {stores} stores of it in each step of mainloops"


def report(job: Job | HelperJob, passed: bool, remark: str) -> bool:
    """Print one line, and the remark if there is one; whether the job passed."""
    name = f"{job.helper.key:28} {job.helper.id}" if isinstance(job, HelperJob) else f"{job.spec.key:28} {job.config}"
    word = "ok" if isinstance(job, HelperJob) or job.to_machine_code else "ok: IR"
    print(f"{word if passed else 'FAILED':6} {job.device.arch:8} {name}", flush=True)
    if remark:
        print(f"       {remark}", flush=True)
    return passed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        # compile for real: neither a cache of an earlier run nor this run's leftovers
        os.environ["TRITON_CACHE_DIR"] = os.environ["FLASHGEN_CACHE_DIR"] = cache
        # the same machine code in nine tenths of the time: which line it comes from is for debuggers alone
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        sys.exit(main())
