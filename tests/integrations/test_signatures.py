"""The arguments of FlashAttention's functions, their order and defaults, as facts of its versions 2.8 and 3."""

from __future__ import annotations

import inspect

import pytest

from flashgen import flash_attn, flash_attn_interface
from flashgen.flash_attn import bert_padding
from flashgen.flash_attn import flash_attn_interface as flash_attn_interface_2
from flashgen.flash_attn.layers import rotary

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
VERSION_2 = {
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {ENDS}, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {ENDS}, {TAIL}, block_table=None",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
EDGES = "window_size_left, window_size_right"
BACKWARD = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
LAST = f"{EDGES}, softcap, alibi_slopes, deterministic, rng_state=None"
PASSES = {
    "_flash_attn_forward": (
        f"q, k, v, dropout_p, softmax_scale, causal, {EDGES}, softcap, alibi_slopes, return_softmax"
    ),
    "_flash_attn_varlen_forward": (
        f"q, k, v, {ENDS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
        "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": f"{BACKWARD}, dropout_p, softmax_scale, causal, {LAST}",
    "_flash_attn_varlen_backward": (
        f"{BACKWARD}, {ENDS}, dropout_p, softmax_scale, causal, {LAST}, zero_tensors=False"
    ),
}
ROTARY = {
    "apply_rotary_emb": (
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
    ),
    "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "apply_rotary_emb_qkv_": (
        "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
    ),
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
}
PADDING = {
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
    "index_first_axis": "input, indices",
    "index_put_first_axis": "values, indices, first_axis_dim",
    "index_first_axis_residual": "input, indices",
}
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
TAIL_3 = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
VERSION_3 = {
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_func": f"q, k, v, {TAIL_3}",
    "flash_attn_varlen_func": f"q, k, v, {ENDS}, seqused_q=None, seqused_k=None, {TAIL_3}",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
        "num_splits=0, pack_gqa=None, sm_margin=0"
    ),
}
MODULES = (
    (flash_attn, VERSION_2),
    (flash_attn_interface_2, PASSES),
    (bert_padding, PADDING),
    (rotary, ROTARY),
    (flash_attn_interface, VERSION_3),
)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(getattr(module, name), text) for module, facts in MODULES for name, text in facts.items()],
    ids=[f"{module.__name__}.{name}" for module, facts in MODULES for name in facts],
)
def test_arguments_are_flash_attentions(function: object, expected: str) -> None:
    assert callable(function)
    found = inspect.signature(function).parameters.values()
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in found)
    assert ", ".join(str(one.replace(annotation=one.empty)) for one in found) == expected


def test_nothing_else_is_exported() -> None:
    assert {*flash_attn.__all__} == {*VERSION_2, "install", "uninstall"}
    assert {*flash_attn_interface.__all__} == {*VERSION_3, "install", "uninstall"}
