"""Torch's own attention, one backend at a time: it serves what it computes fastest, and races are timed against it."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The backends of `scaled_dot_product_attention` by the names that records use.

Their order is that of `flashgen.measure`: the first that can run is the reference kernel of a race.
"""
