"""Which calls get copies of q, k and v, and the heads of these: rows of multiples of 16 bytes.

TMA and wide loads take nothing else. FlashAttention and torch's SDPA pad heads, too, whatever there is to do.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.core.alignment import padded_columns
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.workload import DTYPE_BYTES, Specialization, Workload

LEAST_COPIED_FLOPS = 12e9
"""Of a forward pass, from which on q, k and v that are not aligned to 16 bytes are copied. Copies cost the host about
50 us and move bytes twice; a kernel that loads numbers one by one takes longer for each product. On an H200 all of 18
cases with more were faster with copies, and 28 of 31 with less were slower (32 to 1024 queries)."""


def may_copy(workload: Workload, *, batch_invariant: bool = False) -> bool:
    """Whether q, k and v are copied where they are not aligned to 16 bytes; not for a given config.

    A cache may be of any size, so neither steps of decoding nor pages are. Where bits must not depend on the batch, the
    work of one sequence decides, of which packed ones say nothing: these always are.
    """
    if workload.page_size is not None:
        return False
    if workload.is_packed and batch_invariant:
        return True
    if workload.seqlen_q <= MAX_SEQLEN_Q:
        return False
    forward = replace(workload, direction="forward", batch=1 if batch_invariant else workload.batch)
    return forward.flops >= LEAST_COPIED_FLOPS


def of_copies(workload: Workload) -> Workload:
    """The same with heads of copies, whose further columns are 0: its scores are those of other factors alone."""
    size = DTYPE_BYTES[workload.dtype]
    columns, columns_v = (padded_columns(each, size) for each in (workload.head_dim, workload.head_dim_v))
    return replace(workload, head_dim=columns, head_dim_v=columns_v)


def has_aligned_rows(asked: Workload | Specialization) -> bool:
    """Whether rows of head_dim and of head_dim_v elements, one behind the other, begin at multiples of 16 bytes."""
    size = DTYPE_BYTES[asked.dtype]
    return all(padded_columns(columns, size) == columns for columns in (asked.head_dim, asked.head_dim_v))


def as_served(workload: Workload) -> Workload:
    """What serves calls with dense tensors: the workload itself, or that of copies with wider heads."""
    return workload if has_aligned_rows(workload) or not may_copy(workload) else of_copies(workload)
