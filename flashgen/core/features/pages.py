"""Keys and values in pages: which pages a sequence has, and how many keys there is room for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashgen.core.checks import whole_number
from flashgen.core.decode_limits import MAX_KEYS
from flashgen.core.errors import WorkloadError
from flashgen.core.features.declaration import CallFacts, Feature, KernelTensor, OpArgument, Support, Token, Value
from flashgen.core.features.dtypes import dtype_name
from flashgen.core.features.sequences import sequences_of
from flashgen.core.features.values import Features

if TYPE_CHECKING:
    import torch

MAX_PAGE_STRIDE = 2**31
"""In elements, exclusive: pages lie 32-bit strides apart, and their products with page ids have 64 bits."""


def is_paged(features: Features | None) -> bool:
    """Whether the keys of a call lie in pages."""
    return features is not None and features.block_table is not None


def keys_of_a_table(features: Features, page_size: int) -> int:
    """Keys of a sequence that a row of the table has pages for."""
    table = features.block_table
    return table.shape[1] * page_size if table is not None and len(table.shape) == 2 else 0


def later_sequences(features: Features, number: int) -> Features:
    """The features of a call over pages without its first sequences, whose rows stay in front of the others.

    Ends count from the first row of all: the other sequences are found by what is left of them.
    """

    def rest(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[number:]

    slopes = features.alibi_slopes
    return replace(
        features,
        cu_seqlens_q=rest(features.cu_seqlens_q),
        cu_seqlens_k=rest(features.cu_seqlens_k),
        seqused_k=rest(features.seqused_k),
        block_table=rest(features.block_table),
        alibi_slopes=rest(slopes) if slopes is not None and slopes.dim() == 2 else slopes,
    )


def _checked(features: Features, facts: CallFacts) -> dict[str, Any]:
    table = features.block_table
    if table is None:
        return {}
    batch = sequences_of(features)
    if features.cu_seqlens_q is None:
        raise WorkloadError("a block_table is of packed sequences and comes with cu_seqlens_q, got None")
    if (
        dtype_name(table) != "int32"
        or len(table.shape) != 2
        or table.shape[0] != batch
        or table.device != facts.q.device
    ):
        raise WorkloadError(
            f"block_table is int32 (batch, pages of a sequence), here ({batch}, ...), on the device of q "
            f"({facts.q.device}), got {table.dtype} {tuple(table.shape)} on {table.device}"
        )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise WorkloadError(f"block_table is contiguous along its rows, got strides {tuple(table.stride())}")
    whole_number("page_size", facts.page_size, 0)
    room = keys_of_a_table(features, facts.page_size or 0)
    if room > MAX_KEYS:
        raise WorkloadError(f"a sequence has at most {MAX_KEYS} keys, got a block_table with room for {room}")
    return {}


def _workload(features: Features, facts: CallFacts) -> dict[str, Any]:
    return {"page_size": max(facts.page_size or 0, 1)} if is_paged(features) else {}


PAGES = Feature(
    name="pages",
    fields=("page_size",),
    absent="it reads no paged keys",
    values=(
        Value(name="block_table", op=(OpArgument(schema="Tensor? block_table=None", default=None),), is_late=True),
    ),
    checked=_checked,
    workload=_workload,
    tokens=(Token(text="page", field="page_size"),),
    tensors=(KernelTensor(name="Table", of=lambda features: features.block_table),),
    sizes=("num_pages", "table_keys", "stride_table"),
    trains=False,
    no_gradient="there is no gradient through keys and values in pages: call it under torch.no_grad()",
    words=lambda workload: () if workload.page_size is None else (f"pages of {workload.page_size}",),
    support=(
        Support(group="Memory", name="decoding over paged keys and values", fields={"page_size": 16}),
        Support(
            group="Memory",
            name="packed sequences over paged keys and values (`block_table`)",
            fields={"varlen": True, "page_size": 16},
        ),
    ),
)
"""`flashgen.attention_varlen` and `attention_decode` bring it; a forward pass has it for packed sequences alone."""
