"""The attention of one layer of a model in vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.integrations.vllm.metadata import FlashgenMetadata

Tensor = torch.Tensor


class FlashgenImpl(AttentionImpl):  # type: ignore[misc]  # vLLM has no types here
    """Writes new keys and values into the pages of a layer, and attends to them.

    Raises:
        UnsupportedError: the layer needs what is not supported, which is named.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
    ) -> None:
        unknown = {
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"a cache in {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            "the square root of ALiBi (use_alibi_sqrt)": use_alibi_sqrt,
            f"chunk_lookback={chunk_lookback}": chunk_lookback != -1,
            "context parallelism": getattr(self, "total_cp_world_size", 1) != 1,
        }
        for name, is_asked in unknown.items():
            if is_asked:
                raise UnsupportedError(f"flashgen's vLLM backend does not support {name}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._scores: dict[str, Any] = {
            "causal": True,
            "softmax_scale": self.scale,
            "window": (None if sliding_window is None else sliding_window - 1, None),
            "softcap": logits_soft_cap or 0.0,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            "sinks": sinks,
        }
        self._cache: Tensor | None = None
        self._pages: tuple[Tensor, Tensor] | None = None

    def do_kv_cache_update(
        self, layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values, (tokens, num_kv_heads, head_size), into their slots, where this layer has its own."""
        if self.kv_sharing_target_layer_name is not None:
            return
        k_pages, v_pages = self._split(kv_cache)
        # keys may be padded where slots are not: those behind the last slot are left out
        flashgen.append_kv(key, value, k_pages, v_pages, slot_mapping=slot_mapping)

    def forward(
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashgenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries, (tokens, num_heads, head_size), to the cache; the output is written and returned.

        Keys and values of these tokens are in the cache already, by `do_kv_cache_update`. A profiling run has no
        metadata: its output is 0.

        Raises:
            UnsupportedError: a quantised output is asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("flashgen's vLLM backend does not support quantised outputs")
        if attn_metadata is None:
            return output.fill_(0)
        tokens, written = attn_metadata.num_actual_tokens, output
        if query.shape[0] != tokens:  # views cost microseconds: only where a graph of the rest pads
            query, written = query[:tokens], output[:tokens]
        k_pages, v_pages = self._split(kv_cache)
        found = flashgen.attention_varlen(
            query,
            k_pages,
            v_pages,
            attn_metadata.query_start_loc,
            block_table=attn_metadata.block_table,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_q=attn_metadata.max_query_len,
            num_decodes=attn_metadata.num_decodes,
            **self._scores,
        )
        written.copy_(found.view(written.shape))
        return output

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a cache as (num_blocks, block_size, num_kv_heads, head_size), made once for a cache.

        It is (num_blocks, num_kv_heads, block_size, head_size + head_size_v) in any order of memory, or of versions
        that let a backend choose (num_blocks, 2, block_size, num_kv_heads, head_size).
        """
        if self._pages is None or self._cache is not kv_cache:
            if kv_cache.dim() == 4:
                slots = kv_cache.transpose(1, 2)
                self._pages = slots[..., : self.head_size], slots[..., self.head_size :]
            else:
                self._pages = kv_cache[:, 0], kv_cache[:, 1]
            self._cache = kv_cache
        return self._pages
