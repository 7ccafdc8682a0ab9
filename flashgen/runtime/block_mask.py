"""Block masks: built from a mask_mod once, checked against every call that brings one.

A block of scores is hidden, partial or full. Kernels load no key of a hidden block and evaluate mask_mod in partial
blocks alone, so that the cost of a call follows what its mask leaves visible.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from flashgen.core.checks import MAX_SIZE, whole_number
from flashgen.core.errors import BuildError, DeviceError, WorkloadError
from flashgen.core.features.functions import check_aux
from flashgen.core.features.values import BlockMask
from flashgen.core.quoting import shown
from flashgen.core.score_mods import MASK_BLOCK, ScoreMods
from flashgen.runtime.argument_types import check_tensors
from flashgen.runtime.ops.helpers import is_interpreted
from flashgen.runtime.ops.keys import are_plain
from flashgen.runtime.ops.mods import UserCallable, score_mods


def block_mask(
    mask_mod: UserCallable,
    batch: int | None = None,
    nheads: int | None = None,
    *,
    seqlen_q: int,
    seqlen_k: int,
    aux: tuple[torch.Tensor, ...] = (),
    device: torch.device | str | None = None,
) -> BlockMask:
    """Evaluate `mask_mod` for every query and key, and list the blocks that it leaves visible.

    The lists, of the key blocks of each query block and the other way around, take 16 bytes for each block of 128 x 128
    scores and, while they are built, a few times that; nothing of size seqlen_q x seqlen_k is allocated. A block with
    keys past the end of the sequence is never full.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, k_idx, *aux)`, see `flashgen.attention`; give the same function to the call.
        batch: sequences that differ in their masks; None is one mask for all, and mask_mod is asked for b = 0.
        nheads: query heads that differ in their masks; None is one mask for all, asked for h = 0.
        seqlen_q: query rows of the calls that it is for.
        seqlen_k: keys of the calls that it is for.
        aux: the tensors of the call that follow the function's own arguments. The mask is built from their present
            values.
        device: where it is built and used; None is that of the aux tensors, or the current GPU.

    Raises:
        WorkloadError: an argument breaks a rule.
        DeviceError: the device is no GPU.
        BuildError: Triton cannot compile mask_mod.
    """
    heads = tuple(1 if size is None else _size(name, size, 1) for name, size in (("batch", batch), ("nheads", nheads)))
    seqlen_q, seqlen_k = _size("seqlen_q", seqlen_q, 0), _size("seqlen_k", seqlen_k, 0)
    check_tensors("aux", aux)
    aux = tuple(aux)
    if not are_plain(aux):
        named = ", ".join(sorted({type(one).__name__ for one in aux}))
        raise WorkloadError(
            f"aux tensors of a block mask are tensors of torch itself (a DTensor's full_tensor()), got {named}"
        )
    where = _device(device, aux)
    check_aux(aux, where)
    mods = score_mods(None, mask_mod, tuple(tensor.dtype for tensor in aux))
    visible = _visible_scores(mods, heads, seqlen_q, seqlen_k, aux, where)
    return _listed(visible, seqlen_q, seqlen_k, mods)


def _size(name: str, value: int, least: int) -> int:
    size = whole_number(f"{name} of a block mask", value, None)
    if size < least:
        raise WorkloadError(f"{name} of a block mask is at least {least}, got {size}")
    return size


def _device(device: torch.device | str | None, aux: tuple[torch.Tensor, ...]) -> torch.device:
    if device is not None:
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DeviceError(f"a device is a torch.device or the name of one, got {shown(device)}") from error
    elif aux:
        found = aux[0].device
    else:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type != "cuda" and not is_interpreted():
        raise DeviceError(f"a block mask is built on a GPU, got {found}")
    try:
        return torch.empty(0, device=found).device  # with an index
    except (AssertionError, RuntimeError) as error:  # a torch for CPUs asserts that it is none
        raise DeviceError(f"a block mask is built on a GPU that torch sees, got {found}: {error}") from error


def _visible_scores(
    mods: ScoreMods,
    heads: tuple[int, ...],
    seqlen_q: int,
    seqlen_k: int,
    aux: tuple[torch.Tensor, ...],
    device: torch.device,
) -> torch.Tensor:
    """int32 (batch, nheads, query blocks, key blocks): how many scores of each block mask_mod leaves visible."""
    from flashgen.codegen.block_mask import render_block_mask
    from flashgen.codegen.build import reason_of
    from flashgen.codegen.generated import load_module

    shape = (*heads, -(-seqlen_q // MASK_BLOCK), -(-seqlen_k // MASK_BLOCK))
    if math.prod(shape) > MAX_SIZE:
        raise WorkloadError(f"a block mask has at most {MAX_SIZE} blocks, got {shape}")
    visible = torch.zeros(shape, dtype=torch.int32, device=device)
    if not visible.numel():
        return visible
    source = render_block_mask(mods, MASK_BLOCK)
    module = load_module(source)
    kernel: Any = getattr(module, source.entry)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device:
            kernel[visible.numel(),](visible, heads[1], seqlen_q, seqlen_k, *aux, num_warps=module.NUM_WARPS)
    except Exception as error:  # Triton raises its own and LLVM's errors, without a common base
        assert mods.mask_mod is not None
        raise BuildError(f"Triton cannot run mask_mod {mods.mask_mod.label}: {reason_of(error)}") from error
    return visible


def _listed(visible: torch.Tensor, seqlen_q: int, seqlen_k: int, mods: ScoreMods) -> BlockMask:
    rows = torch.arange(visible.shape[2], device=visible.device) * MASK_BLOCK
    sizes = (seqlen_q - rows).clamp(max=MASK_BLOCK) * MASK_BLOCK
    full = visible == sizes[:, None]
    partial = (visible > 0) & ~full
    assert mods.mask_mod is not None
    found = {"partial": partial, "full": full, "q_partial": partial.mT.contiguous(), "q_full": full.mT.contiguous()}
    lists: dict[str, Any] = {f"{name}_counts": blocks.sum(-1, dtype=torch.int32) for name, blocks in found.items()}
    lists |= {f"{name}_indices": _first(blocks) for name, blocks in found.items()}
    return BlockMask(
        **lists,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        mask_mod=mods.mask_mod.digest,
    )


def _first(blocks: torch.Tensor) -> torch.Tensor:
    """Places along the last axis in order, those that are true first."""
    return torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
