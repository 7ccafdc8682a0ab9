"""What tensors are aligned to."""

from __future__ import annotations

ALIGNMENT_BYTES = 16
"""What TMA demands of base addresses and strides, and the widest load of a thread."""


def padded_columns(columns: int, element_bytes: int) -> int:
    """Columns of rows of the next multiple of 16 bytes."""
    step = ALIGNMENT_BYTES // element_bytes
    return -(-columns // step) * step
