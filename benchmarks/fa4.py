"""FlashAttention-4 (`flash-attn-4`, written in the CuTe DSL), where it is installed: its calls, in its own layout.

Its tensors are (batch, seqlen, nheads, head_dim); here they are seen as (batch, nheads, seqlen, head_dim), without a
copy where they lie in memory as it wants them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.feature_words import feature_words
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload

MODULE, PACKAGE = "flash_attn.cute", "flash-attn-4"
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
DTYPES = ("bf16", "fp16")

Run = Callable[[int], Any]
Tensors = tuple[torch.Tensor, ...]


def is_installed() -> bool:
    """Whether it can be imported; FlashAttention-2, whose package has the same name, is not enough."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except ModuleNotFoundError:
        return False


def version() -> str:
    """The installed version, empty where there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def unsupported(workload: Workload) -> str | None:
    """Why it is not asked for this workload, forward or backward, or None."""
    if not is_installed():
        return f"{MODULE} is not installed"
    if workload.direction == "backward" and set(feature_words(workload)) - {"causal"}:
        return "it is timed without features here"
    if workload.alibi or workload.bias or workload.mask:
        return "ALiBi, a bias or a mask would have to be written in the CuTe DSL"
    dims = (workload.head_dim, workload.head_dim_v)
    if max(dims) > MAX_HEAD_DIM:
        return f"its head_dim ends at {MAX_HEAD_DIM}"
    if any(dim % HEAD_DIM_STEP for dim in dims):
        return f"its head_dim is a multiple of {HEAD_DIM_STEP}"
    return None if workload.dtype in DTYPES else f"it computes in bf16 and fp16, not {workload.dtype}"


def feature_options(workload: Workload, features: Features) -> dict[str, Any]:
    """Its arguments for a window, a softcap and sinks (nheads,); empty where a workload has none of them.

    Its own function for a softcap is made here, once: made anew in every call, as `softcap=` does, it costs the host
    longer than a short kernel runs.
    """
    given: dict[str, Any] = {}
    if workload.specialization.window:
        given["window_size"] = (workload.window_left, 0 if workload.causal else workload.window_right)
    if workload.softcap:
        given["score_mod"] = importlib.import_module(f"{MODULE}.utils").create_softcap_scoremod(features.softcap)
    if workload.sink:
        given["learnable_sink"] = features.sinks
    return given


def forward(q: Tensors, k: Tensors, v: Tensors, *, causal: bool, **options: Any) -> Run:
    """Its public call on the n-th tensors, with an autograd graph where they require a gradient."""
    function = importlib.import_module(MODULE).flash_attn_func
    q, k, v = (tuple(_bshd(tensor) for tensor in group) for group in (q, k, v))

    def run(n: int) -> torch.Tensor:
        out: torch.Tensor = function(q[n], k[n], v[n], causal=causal, **options)[0]
        return out.transpose(1, 2)

    return run


def backward(q: Tensors, k: Tensors, v: Tensors, dout: Tensors, *, causal: bool) -> Run:
    """Its backward pass alone on the n-th tensors, as its autograd function calls it; the forward pass runs here."""
    interface = importlib.import_module(f"{MODULE}.interface")
    q, k, v, dout = (tuple(_bshd(tensor) for tensor in group) for group in (q, k, v, dout))
    saved = [interface._flash_attn_fwd(q[n], k[n], v[n], causal=causal, return_lse=True)[:2] for n in range(len(q))]

    def run(n: int) -> Tensors:
        out, lse = saved[n]
        found = interface._flash_attn_bwd(q[n], k[n], v[n], out, dout[n], lse, causal=causal)
        return tuple(tensor.transpose(1, 2) for tensor in found[:3])

    return run


def _bshd(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()
