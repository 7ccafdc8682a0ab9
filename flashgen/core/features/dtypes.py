"""Names of torch's dtypes, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The short names of the dtypes that numbers for scores may have."""


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of a tensor's dtype, e.g. `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
