"""What FlashAttention's own tests ask of its module beside functions."""

from __future__ import annotations

import torch

USE_TRITON_ROCM = False
"""Its word for its backend on AMD."""


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a row of `S_dmask` that share a largest score, which FlashAttention's tests ask for: all."""
    return 2**31 - 1
