"""What a batch of vLLM's is for flashgen: tensors on the GPU as they lie, and two numbers of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from flashgen.core.errors import UnsupportedError


@dataclass
class FlashgenMetadata:
    """One batch, the same for all layers of a group.

    Attributes:
        num_actual_tokens: queries of all sequences, without padding.
        num_decodes: sequences with one query, which are the first ones; 0 where this may differ in a later replay.
        max_query_len: bound of the queries of a sequence.
        query_start_loc: int32 (sequences + 1,).
        seq_lens: keys of each sequence, those of its queries among them, int32 (sequences,).
        block_table: int32 (sequences, pages).
        slot_mapping: int64 (tokens,), -1 for none.
        causal: always true.
    """

    num_actual_tokens: int
    num_decodes: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class FlashgenMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM has no types here
    """Makes the metadata without waiting for the GPU and without a plan that depends on lengths."""

    # the kernels serve graphs of mixed batches, too; whether vLLM captures those with other lengths than uniform ones
    # have, which `build_for_cudagraph_capture` would need, no engine has shown yet
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None = 1  # vLLM puts sequences with one query in front

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FlashgenMetadata:
        """The metadata of a batch that runs now.

        Raises:
            UnsupportedError: a cascade, or attention that is not causal, is asked for.
        """
        del fast_build  # there is nothing slow to leave out
        common = common_attn_metadata
        if common_prefix_len > 0:
            raise UnsupportedError(
                f"flashgen's vLLM backend does not support cascade attention, got a common prefix of "
                f"{common_prefix_len} keys"
            )
        if common.causal is not True:
            raise UnsupportedError(
                f"flashgen's vLLM backend supports causal attention alone, got causal={common.causal!r}"
            )
        return FlashgenMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=_count_decodes(common),
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashgenMetadata:
        """The metadata of a batch that a graph captures, whose replays may have other sequences of as many tokens.

        Batches whose sequences all have one query have graphs of their own. In all others any sequence may have any
        number of queries when the graph is replayed, so nothing that is captured may follow from this one's.
        """
        metadata = self.build(0, common_attn_metadata)
        if metadata.max_query_len > 1:
            metadata.num_decodes = 0
            metadata.max_query_len = metadata.num_actual_tokens
        return metadata


def _count_decodes(common: Any) -> int:
    """How many sequences in front have one query each."""
    if common.max_query_len == 1:
        return int(common.num_reqs)  # sequences that pad a graph have none, and rows that nobody reads
    starts = common.query_start_loc_cpu
    lengths = starts[1:] - starts[:-1]
    return int((lengths == 1).long().cumprod(0).sum())
