"""What vLLM asks an attention backend: what it supports, and which classes do the work."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from flashgen.integrations.vllm.layer import FlashgenImpl
from flashgen.integrations.vllm.metadata import FlashgenMetadataBuilder

SMALLEST_HEAD, LARGEST_HEAD = 16, 256


class FlashgenBackend(AttentionBackend):  # type: ignore[misc]  # vLLM has no types here
    """Causal attention of decoders over paged caches in bfloat16 or float16, with sinks, softcaps, windows and ALiBi.

    Everything else is refused by vLLM itself when it checks the backend against the model, by what is declared here:
    MLA, sparse attention, fp8 caches, encoders and cross-attention, bidirectional prefixes.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's enumeration."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashgenImpl]:
        """The class of a layer."""
        return FlashgenImpl

    @staticmethod
    def get_builder_cls() -> type[FlashgenMetadataBuilder]:
        """The class that makes the metadata of a batch."""
        return FlashgenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[object]:
        """Pages of 16 slots and multiples, of any kind of cache: others work in flashgen, but no TMA loads them."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(num_blocks, 2, block_size, num_kv_heads, head_size), keys in front of values.

        Versions of vLLM that choose the layout themselves do not ask: the layer takes theirs, too.

        Raises:
            ValueError: pages do not have a multiple of 16 slots.
        """
        if block_size % 16 != 0:
            raise ValueError(f"block_size is a multiple of 16, got {block_size}")
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """As the shape says; with a dimension of layers, blocks stay in front of it."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Never: the metadata of a cascade is refused."""
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """What the kernels of decoding take."""
        return SMALLEST_HEAD <= head_size <= LARGEST_HEAD

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders alone."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        """One number for each head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows of any size."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: which sequences are steps of decoding is counted from the lengths of queries on the host."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From sm80 on."""
        return bool(capability.major >= 8)
