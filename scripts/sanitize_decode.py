"""Run the kernels of serving over odd cases under NVIDIA's compute-sanitizer, on a GPU.

python -m scripts.sanitize_decode [--tool memcheck] [--tool initcheck] ...

Decoding with and without a prefix, `attention` with few queries, `append_kv`, and CUDA graphs that are replayed. Every
tensor is an allocation of its own there, so that a read behind the end of a cache, a table or a list of lengths is one
outside of all memory; but for graphs, whose memory torch's allocator has to own. A run without the tool comes first: it
compiles what is not on disk, and checks results.
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
from typing import Any

import torch

import flashgen
import flashgen.reference
from flashgen.codegen import append_kv, merge_states
from flashgen.codegen.families import DECODE_FAMILIES
from tests.decoding import Case, arguments, assert_right, make, run
from tests.prefixes import joined, make_prefix

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZER = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
DECODING = tuple(row.id for row in DECODE_FAMILIES)
KERNELS = (*DECODING, merge_states.ID, append_kv.ID)
ONE_BY_ONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
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
QUERIES = ((1, False), (4, True), (16, False))
APPENDS = ("rows", "pages", "slots")
GRAPHS = (CASES[0], CASES[3], CASES[4], CASES[-1])


def main(given: Sequence[str] | None = None) -> int:
    """Run; see above for what it returns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable (default: memcheck)")
    parser.add_argument("--inside", choices=PARTS, help="only compute a part, as it is done under the tool")
    options = parser.parse_args(given)
    if options.inside:
        return computed(options.inside)
    path = shutil.which(SANITIZER) or shutil.which(SANITIZER, path=os.pathsep.join(PLACES))
    if path is None:
        print(f"there is no {SANITIZER}: it comes with the CUDA toolkit")
        return NO_TOOL
    for part in PARTS:
        computed(part)
    return max(under(path, tool, part) for tool in options.tool or ["memcheck"] for part in PARTS)


def under(path: str, tool: str, part: str) -> int:
    """The cases of a part in a process that a tool looks at."""
    command = [path, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "scripts.sanitize_decode", "--inside", part]
    environment = os.environ | {"FLASHGEN_QUIET": "1"} | (ONE_BY_ONE if part == "calls" else {})
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    print("\n".join([f"{tool} of {part}: exit code {done.returncode}", *lines[:40], *lines[40:][-10:]]), flush=True)
    if any("not supported" in line for line in lines):
        return NO_TOOL
    # what it finds in kernels of torch is not ours to mend
    is_ours = done.returncode != FOUND or any(name in line for line in lines for name in KERNELS)
    return 1 if done.returncode and is_ours else 0


def computed(part: str) -> int:
    """The calls or the graphs, each compared with what is right; 0, or an error."""
    count = PARTS[part]()
    torch.cuda.synchronize()
    print(f"{count} {part} are right", flush=True)
    return 0


def calls() -> int:
    """Each call once; how many there are."""
    for case in CASES:
        call = make(case, "cuda")
        assert_right(call, *run(call, return_lse=True))
    for case, lens, page in PREFIXES:
        own = Case(**{**vars(case), "lens": case.lens[: 3 * len(lens)]})
        call, prefix = make(own, "cuda"), make_prefix(own, lens, (), page, "cuda")
        tensors, named = arguments(call)
        out, lse = flashgen.attention_decode(*tensors, **{**named, "return_lse": True}, prefix=prefix)
        assert_right(joined(call, prefix), out, lse)
    for rows, causal in QUERIES:
        few_queries(rows, causal=causal)
    for place in APPENDS:
        append(place)
    return len(CASES) + len(PREFIXES) + len(QUERIES) + len(APPENDS)


def few_queries(rows: int, *, causal: bool) -> None:
    """`attention` that decoding serves."""
    q = torch.randn(2, 16, rows, 128, dtype=torch.float16, device="cuda")
    k, v = (torch.randn(2, 2, 3001, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    assert flashgen.explain(q, k, v, causal=causal).served.config.family in DECODING
    right = flashgen.reference.attention(q, k, v, causal=causal)
    torch.testing.assert_close(flashgen.attention(q, k, v, causal=causal), right, atol=4e-3, rtol=4e-3)


def append(place: str) -> None:
    """`append_kv` of tokens of which some have no place, beside the same in torch."""
    appended, given = appending(place)
    expected = [cache.clone() for cache in appended]
    flashgen.reference.append_kv(*given[:2], *expected, **given[2])
    flashgen.append_kv(*given[:2], *appended, **given[2])
    for found, right in zip(appended, expected, strict=True):
        torch.testing.assert_close(found, right, atol=4e-3, rtol=4e-3)


def appending(place: str) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Caches, and new keys, values and options; the last of three sequences has no room for all of its tokens."""
    k, v = (torch.randn(3, 4, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    caches = [torch.randn(5, 16, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2)]

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    cos, sin = (torch.rand(20, 32, dtype=torch.float16, device="cuda") for _ in range(2))
    options: dict[str, Any] = {"seqlens": int32(0, 7, 14), "rotary_cos": cos, "rotary_sin": sin}
    if place == "rows":
        options["batch_idx"] = int32(4, 0, 2)
    elif place == "pages":
        options["block_table"] = int32(3, 0, 1).view(3, 1)
    else:
        slots = [*range(4), 16, 17, -1, 79, 40, 41, -1, 80]
        options = {"slot_mapping": torch.tensor(slots, dtype=torch.int64, device="cuda")}
    return caches, (k, v, options)


def graphs() -> int:
    """Each call in a graph that is replayed with other lengths; how many there are."""
    for case in GRAPHS:
        call = make(case, "cuda")
        run(call, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = run(call, return_lse=True)
        for lens in (call.seqlens // 2, call.seqlens.clamp(max=1), call.seqlens.clone()):
            call.seqlens.copy_(lens)
            graph.replay()
            assert_right(call, out, lse)
    for place in APPENDS:
        caches, (k, v, options) = appending(place)
        flashgen.append_kv(k, v, *caches, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashgen.append_kv(k, v, *caches, **options)
        if "seqlens" in options:
            options["seqlens"] += 1
        expected = [cache.clone() for cache in caches]
        flashgen.reference.append_kv(k, v, *expected, **options)
        graph.replay()
        for found, right in zip(caches, expected, strict=True):
            torch.testing.assert_close(found, right, atol=4e-3, rtol=4e-3)
    return len(GRAPHS) + len(APPENDS)


PARTS = {"calls": calls, "graphs": graphs}


if __name__ == "__main__":
    sys.exit(main())
