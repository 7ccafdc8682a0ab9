"""The user's own score functions, their tensors, and the blocks that a mask function leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flashgen.core.errors import WorkloadError
from flashgen.core.features.declaration import (
    Argument,
    CallFacts,
    Feature,
    KernelTensor,
    OpArgument,
    Support,
    Value,
)
from flashgen.core.features.dtypes import dtype_name
from flashgen.core.features.values import BlockMask, Features
from flashgen.core.score_mods import MASK_BLOCK, ScoreMods, UserFunction

if TYPE_CHECKING:
    import torch

LISTS = ("partial_counts", "partial_indices", "full_counts", "full_indices")
"""The tensors of a block mask: lists of the key blocks of each query block."""

QUERY_LISTS = ("q_partial_counts", "q_partial_indices", "q_full_counts", "q_full_indices")
"""Its lists of the query blocks of each key block, which backward passes read, too."""


def list_pointer(name: str) -> str:
    """The parameter of kernels that points to this tensor of a block mask."""
    return "".join(part.capitalize() for part in name.split("_"))


def check_aux(aux: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Refuse aux tensors that a function cannot index by plain arithmetic.

    Raises:
        WorkloadError: a tensor is not contiguous or lives elsewhere.
    """
    for i, tensor in enumerate(aux):
        if tensor.device != device or not tensor.is_contiguous():
            raise WorkloadError(
                f"aux tensors are contiguous and on the device of q ({device}), got aux[{i}] with shape "
                f"{tuple(tensor.shape)} and strides {tuple(tensor.stride())} on {tensor.device}"
            )


def check_block_mask(
    mask: BlockMask, mods: ScoreMods, *, batch: int, nheads: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> None:
    """Refuse a block mask that does not belong to a call.

    Raises:
        WorkloadError: lengths, shapes, device or mask_mod are not those of the call.
    """
    if (mask.seqlen_q, mask.seqlen_k) != (seqlen_q, seqlen_k):
        raise WorkloadError(
            f"a block mask is built for the lengths of its call, got one for seqlen_q {mask.seqlen_q} and seqlen_k "
            f"{mask.seqlen_k} in a call with {seqlen_q} and {seqlen_k}"
        )
    digest = mods.mask_mod.digest if mods.mask_mod else ""
    if mask.mask_mod and mask.mask_mod != digest:
        raise WorkloadError(
            f"a block mask goes with the mask_mod that it was built from, got one of {mask.mask_mod} and a call with "
            f"mask_mod {digest or None}"
        )
    if mask.block_size != MASK_BLOCK:
        raise WorkloadError(f"block_size of a block mask is {MASK_BLOCK}, got {mask.block_size}")
    heads = tuple(mask.partial_counts.shape[:2])
    if len(heads) != 2 or heads[0] not in (1, batch) or heads[1] not in (1, nheads):
        raise WorkloadError(
            f"a block mask has 1 or all of the call's {batch} sequences and {nheads} heads, got shape "
            f"{tuple(mask.partial_counts.shape)} of partial_counts"
        )
    rows, keys = -(-seqlen_q // MASK_BLOCK), -(-seqlen_k // MASK_BLOCK)
    _check_lists(mask, LISTS, (*heads, rows, keys), device)
    if mask.q_partial_counts is not None:
        _check_lists(mask, QUERY_LISTS, (*heads, keys, rows), device)


def _check_lists(mask: BlockMask, names: tuple[str, ...], indices: tuple[int, ...], device: torch.device) -> None:
    for name in names:
        tensor, shape = getattr(mask, name), indices[:-1] if name.endswith("counts") else indices
        if dtype_name(tensor) != "int32" or tensor.shape != shape or tensor.device != device:
            raise WorkloadError(
                f"{name} of a block mask is int32 {shape} on {device}, got {tensor.dtype} {tuple(tensor.shape)} on "
                f"{tensor.device}"
            )
        if not tensor.is_contiguous():
            raise WorkloadError(f"{name} of a block mask is contiguous, got strides {tuple(tensor.stride())}")


def _checked(features: Features, facts: CallFacts) -> dict[str, Any]:
    if facts.mods is not None:
        check_aux(features.aux, facts.q.device)
        if features.block_mask is not None:
            batch, nheads, seqlen_q, seqlen_k = facts.sizes
            check_block_mask(
                features.block_mask,
                facts.mods,
                batch=batch,
                nheads=nheads,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                device=facts.q.device,
            )
    return {}


def _tensors(mask: BlockMask | None) -> list[torch.Tensor] | None:
    if mask is None:
        return None
    return [getattr(mask, name) for name in (*LISTS, *(QUERY_LISTS if mask.trains else ()))]


def _sizes(mask: BlockMask | None) -> list[int]:
    return [] if mask is None else [mask.seqlen_q, mask.seqlen_k, mask.block_size]


def _restored(tensors: Sequence[torch.Tensor] | None, sizes: Sequence[int], mask_mod: str) -> BlockMask | None:
    if not tensors:
        return None
    seqlen_q, seqlen_k, block_size = sizes
    lists = dict(zip((*LISTS, *QUERY_LISTS), tensors, strict=False))
    return BlockMask(**lists, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_size=block_size, mask_mod=mask_mod)


def _list_of(name: str) -> Callable[[Features], torch.Tensor | None]:
    return lambda features: getattr(features.block_mask, name, None)


_SCORE = UserFunction(name="score", source="def score(s, b, h, q_idx, k_idx):\n    return s\n")
_MASK = UserFunction(name="mask", source="def mask(b, h, q_idx, k_idx):\n    return q_idx >= k_idx\n")

FUNCTIONS = Feature(
    name="functions",
    fields=("mods",),
    absent="it takes no functions of the caller",
    absent_backward="no gradient through functions of the caller",
    arguments=(
        Argument(name="score_mod"),
        Argument(name="mask_mod"),
        Argument(name="aux", default=()),
        Argument(name="block_mask"),
    ),
    values=(
        Value(
            name="mods",
            default=0,
            chooses_code="value",
            op=(OpArgument(schema="int mods=0", default=0),),
            is_last_in_training=True,
        ),
        Value(
            name="aux",
            default=(),
            chooses_code="tensors",
            op=(OpArgument(schema="Tensor[]? aux=None", default=None, read=lambda aux: list(aux) if aux else None),),
            restore=lambda aux: tuple(aux or ()),
            is_last_in_training=True,
        ),
        Value(
            name="block_mask",
            chooses_code="tensors",
            op=(
                OpArgument(schema="Tensor[]? block_mask=None", default=None, read=_tensors),
                OpArgument(schema="int[] block_sizes=[]", default=(), read=_sizes),
                OpArgument(schema="str block_mask_mod=''", default="", read=lambda mask: mask.mask_mod if mask else ""),
            ),
            restore=_restored,
            is_last_in_training=True,
        ),
    ),
    checked=_checked,
    tensors=tuple(KernelTensor(name=list_pointer(name), of=_list_of(name)) for name in (*LISTS, *QUERY_LISTS)),
    sizes=("num_q_blocks", "num_k_blocks", "stride_block_b", "stride_block_h"),
    no_gradient=(
        "tensors that functions of the caller load from have no gradient through a mask_mod alone, nor under "
        "torch.compile, torch.func or a dispatch mode, nor as subclasses of tensors, and one requires it: detach it, "
        "or add what is learned as a bias"
    ),
    specialization_words=lambda spec: (spec.mods.title,) if spec.mods else (),
    support=(
        Support(group="Masks", name="`mask_mod`", fields={"mods": ScoreMods(mask_mod=_MASK)}),
        Support(
            group="Masks",
            name="`mask_mod` with a block mask",
            fields={"mods": ScoreMods(mask_mod=_MASK, block_mask=True)},
        ),
        Support(group="Scores", name="`score_mod`", fields={"mods": ScoreMods(score_mod=_SCORE)}),
    ),
)
"""Its key tokens are those of `ScoreMods.key`; aux tensors are the parameters `Aux0`, `Aux1` and so on."""
