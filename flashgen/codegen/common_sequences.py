"""Packed sequences of different lengths, alike in all families: parameters, grids, and what goes with them."""

from __future__ import annotations

from flashgen.codegen.family import Parameter, Sizes
from flashgen.codegen.head_parts import power_of_two
from flashgen.core.workload import Specialization

SEQUENCE_POINTERS = ("CuSeqlensQ", "CuSeqlensK", "SeqUsedQ", "SeqUsedK")
SEQUENCE_FLAGS = ("has_seqused_q", "has_seqused_k")
SEQUENCE_SIZES = ("sequences", "total_q", "total_k")


def sequence_parameters(spec: Specialization) -> list[Parameter]:
    """Where the sequences of a call lie; none for a call of one length."""
    if not spec.varlen:
        return []
    names = (*SEQUENCE_POINTERS, *(["Table"] if spec.page_size else []))
    pointers = [Parameter(name=name, type="*i32") for name in names]
    return pointers + [Parameter(name=name, type="i32") for name in SEQUENCE_FLAGS]


def table_strides(spec: Specialization) -> list[Parameter]:
    """The stride of the rows of a block table."""
    return [Parameter(name="stride_table", type="i64")] if spec.page_size else []


def query_blocks(sizes: Sizes, block: int) -> int:
    """Blocks of queries that there are at most, of sequences whose lengths the host does not know, and one more.

    That one, and those that are left, write the rows that no sequence has.
    """
    return min(sizes.seqlen_q // block + sizes.sequences, sizes.sequences * -(-sizes.max_seqlen_q // block)) + 1


def key_blocks(sizes: Sizes, block: int) -> int:
    """The same of keys."""
    return min(sizes.seqlen_k // block + sizes.sequences, sizes.sequences * -(-sizes.max_seqlen_k // block)) + 1


def largest_of_class(sequences: int, rows: int, queries: int, keys: int) -> tuple[int, int, int, int]:
    """The largest batch of packed sequences of a class: no length is longer than all rows.

    Args:
        sequences: how many.
        rows: query rows of all of them.
        queries: the bound of their lengths.
        keys: likewise.
    """
    most = power_of_two(rows)
    return power_of_two(sequences), most, min(power_of_two(queries), most), power_of_two(keys)


def of_class(sizes: Sizes) -> Sizes:
    """The largest sizes of the class of a batch of packed sequences."""
    given = sizes.sequences, sizes.seqlen_q, sizes.max_seqlen_q, sizes.max_seqlen_k
    sequences, rows, queries, keys = largest_of_class(*given)
    return sizes._replace(sequences=sequences, seqlen_q=rows, max_seqlen_q=queries, max_seqlen_k=keys)


def why_not_packed(spec: Specialization) -> str | None:
    """What no family computes of packed sequences: the reason, or None."""
    if not spec.varlen:
        return None
    if spec.bias or spec.mask:
        return "packed sequences have no bias and no mask of one tensor"
    if spec.mods is not None and spec.mods.block_mask:
        return "packed sequences have no block mask"
    return "query offsets of packed sequences follow from their lengths" if spec.offset_tensor else None


def why_not_in_pages(spec: Specialization) -> str | None:
    """What no forward family computes over pages: the reason, or None."""
    if spec.page_size and not spec.varlen:
        return "it reads no paged keys but those of packed sequences"
    return None
