"""vLLM's Triton kernel for paged caches as an implementation of the decode benchmark.

It is called as `TritonAttentionImpl.forward` does: keys of few sequences in 16 segments that a second kernel merges,
and of many whole. vLLM need not be installed: `VLLM_CHECKOUT` may name a checkout of its sources, of which the kernel's
files are loaded, with stand-ins for the modules that they take a flag, a logger or a dtype from.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import logging
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.impls import Call

if TYPE_CHECKING:
    from benchmarks.decode_cases import Caches, Step

CHECKOUT = "VLLM_CHECKOUT"
MODULE = "vllm.v1.attention.ops.triton_unified_attention"
SEGMENTS, LEAST_PROGRAMS = 16, 128
"""`NUM_PAR_SOFTMAX_SEGMENTS` and `MIN_LAUNCH_GRID_SIZE_2D` of vLLM's backend."""


def vllm_version() -> str:
    """That of the package, or of the checkout where it has been built."""
    checkout = os.environ.get(CHECKOUT)
    if not checkout:
        return str(importlib.import_module("vllm").__version__)
    file = Path(checkout) / "vllm" / "_version.py"
    found = re.search(r"version = '([^']+)'", file.read_text()) if file.exists() else None
    return found[1] if found else "checkout"


def why_not_vllm(step: Step) -> str | None:
    """Why vLLM's kernel cannot run a step, or None."""
    if step.workload.page_size is None:
        return "vLLM's caches have pages"
    if step.workload.page_size % 16:
        return "vLLM's pages are multiples of 16"
    return why_not_installed()


def why_not_installed() -> str | None:
    """Why there is no such kernel here, or None."""
    checkout = os.environ.get(CHECKOUT)
    if checkout:
        file = Path(checkout) / f"{MODULE.replace('.', '/')}.py"
        return None if file.exists() else f"{CHECKOUT} names a folder without {MODULE.replace('.', '/')}.py"
    if importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed, and {CHECKOUT} names no checkout of it"
    return None


def vllm_call(step: Step, found: Caches) -> Call:
    """Calls of its kernel on the sets of a step's caches."""
    w, function, device = step.workload, _unified_attention(), found.lens.device
    most = LEAST_PROGRAMS // w.nheads_k
    segments = (most, w.nheads, SEGMENTS)
    wide = 1 << (w.head_dim - 1).bit_length()
    options: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(w.batch + 1, dtype=torch.int32, device=device) * w.seqlen_q,
        "max_seqlen_q": w.seqlen_q,
        "seqused_k": found.lens,
        "max_seqlen_k": w.seqlen_k,
        "softmax_scale": w.head_dim**-0.5,
        "causal": True,
        "window_size": (-1, -1) if w.window_left is None else (w.window_left, 0),
        "block_table": found.table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": torch.ones(1, device=device).expand(w.batch, w.nheads_k),
        "v_descale": torch.ones(1, device=device).expand(w.batch, w.nheads_k),
        "seq_threshold_3D": most,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(*segments, wide, device=device),
        "softmax_segm_max": torch.empty(segments, device=device),
        "softmax_segm_expsum": torch.empty(segments, device=device),
        "sinks": found.sinks,
    }

    def run(n: int) -> torch.Tensor:
        q = found.q[n]
        out = torch.empty_like(q)
        function(q=q.flatten(0, 1), k=found.k[n], v=found.v[n], out=out.flatten(0, 1), **options)
        return out

    return Call(run=run)


def _unified_attention() -> Any:
    checkout = os.environ.get(CHECKOUT)
    if checkout and MODULE not in sys.modules:
        sys.modules.update(_stand_ins(Path(checkout) / "vllm"))
    return importlib.import_module(MODULE).unified_attention


def _stand_ins(package: Path) -> dict[str, ModuleType]:
    """The packages on the way to the kernel, and what its files import beside each other."""
    import triton
    import triton.language as tl

    found = {}
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        found[name] = ModuleType(name)
        found[name].__path__ = [str(package.joinpath(*name.split(".")[1:]))]
    modes = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD")
    quantization = enum.IntEnum("KVQuantMode", modes, start=0)
    hopper = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False)
    values: dict[str, dict[str, object]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": hopper},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": quantization},
    }
    for name, members in values.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(members)
        parent, _, child = name.rpartition(".")
        setattr(found[parent], child, found[name])
    return found
