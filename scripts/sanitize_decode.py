"""Run the decode kernels over odd cases under NVIDIA's compute-sanitizer, on a GPU.

python -m scripts.sanitize_decode [--tool memcheck] [--tool initcheck] ...

Every tensor is an allocation of its own there, so that a read behind the end of a cache, a table or a list of lengths
is one outside of all memory. A run without the tool comes first: it compiles what is not on disk, and checks results.
Exit code 1 if a tool finds something, 2 where there is no tool or it cannot look at this GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import flashgen
from flashgen.codegen import merge_states
from flashgen.codegen.families import DECODE_FAMILIES
from tests.decoding import Case, arguments, assert_right, make, run
from tests.prefixes import joined, make_prefix

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZER = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
KERNELS = (*(row.id for row in DECODE_FAMILIES), merge_states.ID)
FOUND, NO_TOOL = 9, 2
CAUSAL = {"causal": True}
SMALL = {"nheads": 4, "nheads_k": 2, "head_dim": 64}

CASES = (
    Case(lens=(3, 65, 0, 1), **SMALL),
    Case(lens=(129,), nheads=7, nheads_k=1, head_dim=96, head_dim_v=80),
    Case(lens=(0, 1, 20), page=1, **SMALL),
    Case(lens=(0, 1, 15, 16, 17, 300), page=16, layout="hnd", **SMALL),
    Case(lens=(63, 64, 65, 700), page=64, layout="halves", seqlen_q=2, options=CAUSAL, **SMALL),
    Case(lens=(127, 128, 129), page=128, layout="interleaved", **SMALL),
    Case(lens=(23, 24, 25), page=24, **SMALL),
    Case(lens=(2, 5, 40), seqlen_q=5, nheads=6, nheads_k=2, head_dim=40, options=CAUSAL),
    Case(lens=(3, 64, 500, 0), page=16, sinks=True, options={"window": (20, 0)}, **SMALL),
    Case(lens=(50, 0, 18), alibi=True, options={"softcap": 3.0}, **SMALL),
    Case(lens=(50, 20, 9), leftpad=(3, 19, 9), seqlen_q=2, options=CAUSAL, **SMALL),
    Case(lens=(50, 2), batch_idx=(3, 0), **SMALL),
    Case(lens=(33, 7), seqlen_q=16, nheads=16, nheads_k=2, head_dim=128, options=CAUSAL),
    Case(lens=(700, 0, 130), page=16, options={"fixed_split_size": 128}, **SMALL),
)
PREFIXES = ((CASES[0], (77,), None), (CASES[3], (40, 16, 0), 16))


def main(given: Sequence[str] | None = None) -> int:
    """Run; see above for what it returns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable (default: memcheck)")
    parser.add_argument("--inside", action="store_true", help="only compute, as it is done under the tool")
    options = parser.parse_args(given)
    if options.inside:
        return compute()
    path = shutil.which(SANITIZER) or shutil.which(SANITIZER, path=os.pathsep.join(PLACES))
    if path is None:
        print(f"there is no {SANITIZER}: it comes with the CUDA toolkit")
        return NO_TOOL
    if compute():
        return 1
    return max(under(path, tool) for tool in options.tool or ["memcheck"])


def under(path: str, tool: str) -> int:
    """The cases in a process that a tool looks at."""
    command = [path, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "scripts.sanitize_decode", "--inside"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FLASHGEN_QUIET": "1"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    print("\n".join([f"{tool}: exit code {done.returncode}", *lines[:40], *lines[40:][-10:]]), flush=True)
    if any("not supported" in line for line in lines):
        return NO_TOOL
    # what it finds in kernels of torch is not ours to mend
    is_ours = done.returncode != FOUND or any(name in line for line in lines for name in KERNELS)
    return 1 if done.returncode and is_ours else 0


def compute() -> int:
    """All cases, each compared with the oracle; 0 if they are right."""
    for case in CASES:
        call = make(case, "cuda")
        assert_right(call, *run(call, return_lse=True))
    for case, lens, page in PREFIXES:
        own = Case(**{**vars(case), "lens": case.lens[: 3 * len(lens)]})
        call, prefix = make(own, "cuda"), make_prefix(own, lens, (), page, "cuda")
        tensors, named = arguments(call)
        out, lse = flashgen.attention_decode(*tensors, **{**named, "return_lse": True}, prefix=prefix)
        assert_right(joined(call, prefix), out, lse)
    torch.cuda.synchronize()
    print(f"{len(CASES) + len(PREFIXES)} calls are right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
