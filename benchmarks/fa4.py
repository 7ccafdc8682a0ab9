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

from benchmarks.flex import flex_module, mask_mod
from flashgen.core.feature_words import feature_words
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload

MODULE, PACKAGE = "flash_attn.cute", "flash-attn-4"
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
MAX_BLOCK_SPARSE_DIM, SMALL_HEADS_BLOCK_M, BLOCK = 128, 192, 128
"""Its tiles on Hopper: 192 queries by 128 keys up to heads of 64, then 128 by 128 up to heads of 128."""

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
    if sum(map(bool, (workload.softcap, workload.alibi, workload.bias, workload.mask))) > 1:
        return "of softcap, ALiBi, a bias and a mask, one at a time is written in the CuTe DSL here"
    if workload.mask and (workload.causal or workload.specialization.window):
        return "with a function for a mask it has no causal mask and no window of its own"
    return limits(workload)


def limits(workload: Workload) -> str | None:
    """What its kernels cannot do whatever they are asked for: why they cannot run this workload, or None."""
    if not is_installed():
        return f"{MODULE} is not installed"
    dims = (workload.head_dim, workload.head_dim_v)
    if max(dims) > MAX_HEAD_DIM:
        return f"its head_dim ends at {MAX_HEAD_DIM}"
    if any(dim % HEAD_DIM_STEP for dim in dims):
        return f"its head_dim is a multiple of {HEAD_DIM_STEP}"
    return None if workload.dtype in DTYPES else f"it computes in bf16 and fp16, not {workload.dtype}"


def feature_options(workload: Workload, features: Features) -> dict[str, Any]:
    """Its arguments for the features of a workload; empty where there are none.

    It has a window and sinks (nheads,) of its own; all else are functions in the CuTe DSL. They are made here, once:
    made anew in every call, as `softcap=` does, they cost the host longer than a short kernel runs.
    """
    given: dict[str, Any] = {}
    if workload.specialization.window:
        given["window_size"] = (workload.window_left, 0 if workload.causal else workload.window_right)
    if workload.softcap:
        given["score_mod"] = importlib.import_module(f"{MODULE}.utils").create_softcap_scoremod(features.softcap)
    if workload.sink:
        given["learnable_sink"] = features.sinks
    if features.alibi_slopes is not None:
        given |= mods().alibi(features.alibi_slopes, workload.seqlen_k - workload.seqlen_q)
    if features.bias is not None:
        given |= mods().bias(features.bias.expand(workload.batch, workload.nheads, workload.seqlen_q, -1))
    if features.mask is not None:
        whole = workload.mask == "full"
        given |= mods().mask(features.mask[:, 0] if whole else features.mask[:, 0, 0])
    if workload.mask == "keys":
        given |= _visible_blocks(workload, features)
    return given


def mods() -> Any:
    """Our functions in the CuTe DSL, imported late because they import it."""
    return importlib.import_module("benchmarks.fa4_mods")


def _visible_blocks(workload: Workload, features: Features) -> dict[str, Any]:
    """The blocks that hold a visible key, in blocks of its own tiles: it skips the others. Nothing beyond heads of 128.

    A mask with a value for each score has no such blocks here.
    """
    if workload.head_dim > MAX_BLOCK_SPARSE_DIM:
        return {}
    size = block_size(workload)
    lengths = (workload.seqlen_q, workload.seqlen_k)
    device = features.mask.device if features.mask is not None else None
    found = flex_module().create_block_mask(
        mask_mod(workload, features), workload.batch, None, *lengths, device=device, BLOCK_SIZE=size
    )
    return {"block_sparse_tensors": listed(found, size)}


def block_size(workload: Workload) -> tuple[int, int]:
    """Queries and keys of its own tiles, for heads up to 128."""
    return SMALL_HEADS_BLOCK_M if workload.head_dim <= 64 else BLOCK, BLOCK


def listed(found: Any, size: tuple[int, int]) -> Any:
    """FlexAttention's block mask, whose blocks have this size, as it takes it."""
    blocks = (found.kv_num_blocks, found.kv_indices, found.full_kv_num_blocks, found.full_kv_indices)
    return importlib.import_module(f"{MODULE}.block_sparsity").BlockSparseTensorsTorch(*blocks, block_size=size)


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
