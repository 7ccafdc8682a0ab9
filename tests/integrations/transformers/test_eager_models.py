"""Models that read a mask as eager attention does: None hides nothing, and no module says that it is causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.clap.modeling_clap import ClapTextConfig, ClapTextModel

pytestmark = pytest.mark.xdist_group("transformers")

ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
GEMMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {},
}
IDS = (torch.arange(22).view(2, 11) % 60) + 3


def nothing() -> dict[str, Any]:
    return {}


def both(
    kind: Any, config: Any, caches: Callable[[], dict[str, Any]] = nothing, **inputs: Any
) -> tuple[torch.Tensor, ...]:
    """What a model computes with eager attention and with flashgen's, each with caches of its own."""
    found = []
    for attention in ("eager", "fgen"):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            found.append(model(input_ids=IDS, **inputs, **caches())[0])
    return tuple(found)


@pytest.mark.parametrize("name", ["BigBirdPegasusForCausalLM", "NllbMoeForConditionalGeneration"])
def test_decoders_whose_modules_do_not_say_that_they_are_causal(name: str, fgen: str) -> None:
    kind = getattr(transformers, name)
    config = kind.config_class(**DECODER, **({"num_experts": 2} if "Moe" in name else {}))
    inputs = {"decoder_input_ids": IDS} if "Conditional" in name else {}
    eager, found = both(kind, config, **inputs, use_cache=False)
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config"), [(ClapTextModel, ClapTextConfig), (transformers.SplinterModel, transformers.SplinterConfig)]
)
def test_encoders_whose_modules_do_not_say_that_they_are_not(kind: Any, config: Any, fgen: str) -> None:
    eager, found = both(kind, config(**ENCODER))
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kept", [1, 3])
def test_layers_that_keep_the_last_queries_alone(static: bool, kept: int, fgen: str) -> None:
    config = transformers.Gemma4TextConfig(**GEMMA)

    def caches() -> dict[str, Any]:
        return {"past_key_values": transformers.StaticCache(config=config, max_cache_len=32)} if static else {}

    eager, found = both(transformers.Gemma4ForCausalLM, config, caches, logits_to_keep=kept)
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [5, 7, 9])
@pytest.mark.parametrize("batches", [(2, 2), (1, 2), (2, 1)])
def test_a_call_without_a_mask_is_sdpa_s(keys: int, batches: tuple[int, int], fgen: str) -> None:
    """Causal from the top left, and a batch of one broadcasts."""
    torch.manual_seed(0)
    q, k = torch.randn(batches[0], 4, 7, 16), torch.randn(batches[1], 4, keys, 16)
    attend, module = AttentionInterface._global_mapping[fgen], torch.nn.Identity()
    expected, _ = sdpa_attention_forward(module, q, k[:, :, :7], k[:, :, :7], None, is_causal=True)
    found, _ = attend(module, q, k, k, None, is_causal=True)
    torch.testing.assert_close(found, expected)
    expected, _ = sdpa_attention_forward(module, q, k, k, None, is_causal=False)
    torch.testing.assert_close(attend(module, q, k, k, None)[0], expected)
