"""The attention backend that SGLang's model runner calls: metadata once a batch, then each layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.integrations.sglang.metadata import FlashgenMetadata, Tables, longest

Tensor = torch.Tensor

NHD = "nhd"
"""SGLang's name for keys and values in (slots, heads, head_dim)."""

TANH = "tanh"
"""How SGLang caps scores, unless a layer says otherwise."""

PADDED_LENGTH = 1
"""Keys of a request that pads a CUDA graph; nobody reads what it gives."""


class FlashgenBackend(AttentionBackend):  # type: ignore[misc]  # SGLang has no types here
    """Causal attention of decoders over SGLang's pool of slots, in pages of any size, in bfloat16 or float16.

    Raises:
        UnsupportedError: the model or the server asks for something else, which is named.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        arguments, config, pool = model_runner.server_args, model_runner.model_config, model_runner.token_to_kv_pool
        buffers = getattr(pool, "full_kv_pool", pool)  # of a model with linear attention in its other layers
        unknown = {
            "multi-head latent attention": getattr(model_runner, "use_mla_backend", False),
            "encoders and cross-attention": getattr(config, "is_encoder_decoder", False),
            "speculative decoding": getattr(arguments, "speculative_algorithm", None) is not None,
            "context parallelism": any(getattr(arguments, name, 1) != 1 for name in ("dcp_size", "attn_cp_size")),
            "a cache in " + str(model_runner.kv_cache_dtype): model_runner.kv_cache_dtype
            not in (torch.bfloat16, torch.float16),
            "a pool of its own for sliding windows (start with --disable-hybrid-swa-memory)": hasattr(
                pool, "full_to_swa_index_mapping"
            ),
            "a pool whose slots have other places than its buffers": getattr(
                buffers, "requires_physical_write_loc", False
            ),
            f"a pool in the layout {getattr(buffers, 'kv_cache_layout', NHD)}": getattr(buffers, "kv_cache_layout", NHD)
            != NHD,
        }
        for name, is_asked in unknown.items():
            _refuse(name, is_asked)
        self._page, self._pool = model_runner.page_size, pool
        self._tables = Tables(model_runner.req_to_token_pool.req_to_token, self._page, config.context_len)
        self.forward_metadata: FlashgenMetadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a batch that runs now: steps of decoding, or prompts behind what is cached of them."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            return
        made = self._tables.of(batch.req_pool_indices, batch.seq_lens, getattr(batch, "seq_lens_cpu", None))
        if not mode.is_decode():
            _refuse("speculative decoding", getattr(batch, "spec_info", None) is not None)
            starts = torch.zeros(len(batch.seq_lens) + 1, dtype=torch.int32, device=made.seq_lens.device)
            torch.cumsum(batch.extend_seq_lens, 0, out=starts[1:])
            made = FlashgenMetadata(
                seq_lens=made.seq_lens,
                table=made.table,
                query_starts=starts,
                max_query_len=longest(batch.extend_seq_lens_cpu),
            )
        self.forward_metadata = made

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *given: Any, **named: Any) -> None:
        """Make the tensors that all graphs read."""
        self._tables.keep(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill what a graph reads, before it is captured and before each replay.

        Raises:
            UnsupportedError: it is no step of decoding of one token a request.
        """
        batch = forward_batch
        is_step = batch.forward_mode.is_decode() and getattr(batch, "spec_info", None) is None
        _refuse("CUDA graphs of anything but steps of decoding", not is_step)
        lengths = None if in_capture else getattr(batch, "seq_lens_cpu", None)
        self.forward_metadata = self._tables.kept(batch.req_pool_indices, batch.seq_lens, lengths)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """The same before a capture, for versions of SGLang that call this.

        Raises:
            UnsupportedError: it is no step of decoding of one token a request.
        """
        _refuse("CUDA graphs of anything but steps of decoding", not forward_mode.is_decode() or spec_info is not None)
        self.forward_metadata = self._tables.kept(req_pool_indices[:bs], seq_lens)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None = None,
        **named: Any,
    ) -> None:
        """The same before a replay, for versions of SGLang that call this."""
        lengths = None if seq_lens_cpu is None else seq_lens_cpu[:bs]
        self.forward_metadata = self._tables.kept(req_pool_indices[:bs], seq_lens, lengths)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a request that pads a graph."""
        return PADDED_LENGTH

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """One query of each request, (requests, tp_q_head_num * head_dim); returns (.., tp_q_head_num * v_head_dim)."""
        pages, scores = self._prepared(k, v, layer, forward_batch, save_kv_cache, sinks, others)
        metadata = self._made()
        rows = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        found: Tensor = flashgen.attention_decode(rows, *pages, metadata.seq_lens, block_table=metadata.table, **scores)
        return found.view(len(rows), -1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The new queries of each request, (tokens, tp_q_head_num * head_dim), packed one behind the other."""
        pages, scores = self._prepared(k, v, layer, forward_batch, save_kv_cache, sinks, others)
        metadata = self._made()
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        assert metadata.query_starts is not None
        found: Tensor = flashgen.attention_varlen(
            rows,
            *pages,
            metadata.query_starts,
            block_table=metadata.table,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query_len,
            **scores,
        )
        return found.view(len(rows), -1)

    def support_triton(self) -> bool:
        """SGLang's own Triton kernels may run beside it."""
        return True

    def _made(self) -> FlashgenMetadata:
        if self.forward_metadata is None:
            raise UnsupportedError(
                "flashgen's SGLang backend attends after init_forward_metadata, and nobody called it"
            )
        return self.forward_metadata

    def _prepared(
        self,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None,
        others: dict[str, Any],
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Keys and values as pages, with the new ones among them, and the arguments of a call for a layer."""
        kind = str(getattr(layer.attn_type, "value", layer.attn_type)) if hasattr(layer, "attn_type") else "decoder"
        _refuse(f"attention of type {kind}", kind != "decoder")
        _refuse("cross-attention", getattr(layer, "is_cross_attention", False))
        _refuse("attention in chunks (use_irope)", getattr(layer, "use_irope", False))
        _refuse("scores by length (xai_temperature_len)", (getattr(layer, "xai_temperature_len", -1) or -1) > 0)
        capping = getattr(layer, "logit_capping_method", TANH)
        _refuse(f"scores capped by {capping}", bool(layer.logit_cap) and capping != TANH)
        _refuse("an LSE beside the output", getattr(batch, "mha_return_lse", False) is True)
        for name, value in others.items():
            _refuse(name, value is not None and value is not False)
        pool = self._pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        pages = tuple(buffer.view(-1, self._page, *buffer.shape[1:]) for buffer in buffers)
        window = layer.sliding_window_size  # keys before the query's own, as flashgen's
        scores: dict[str, Any] = {
            "causal": True,
            "softmax_scale": layer.scaling,
            "softcap": layer.logit_cap or 0.0,
            "window": (window if window is not None and window >= 0 else None, None),
            "sinks": sinks,
        }
        return (pages[0], pages[1]), scores


def _refuse(name: str, is_asked: bool) -> None:
    """Refuse what is not supported, by name.

    Raises:
        UnsupportedError: it is asked for.
    """
    if is_asked:
        raise UnsupportedError(f"flashgen's SGLang backend does not support {name}")
