"""What flashgen does not compute is refused by name; nothing is computed in another way instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.integrations import transformers as door
from tests.tiny_models import MODELS, SIZES

pytestmark = pytest.mark.xdist_group("transformers")

LLAMA = next(model for model in MODELS if model.name == "llama")
OTHERS = {
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"vocab_size": 64, "d_model": 64, "n_layers": 1, "n_heads": 4, "max_seq_len": 32}),
    "falcon": ("FalconForCausalLM", {**SIZES, "num_hidden_layers": 1}),
    "gptj": (
        "GPTJForCausalLM",
        {"n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    ),
}
OWN = {"bloom": "BloomAttention", "mpt": "MptAttention", "falcon": "FalconAttention", "gptj": "GPTJAttention"}


@pytest.mark.parametrize("name", OTHERS)
def test_models_with_attention_of_their_own_are_refused_by_name(name: str, fgen: str) -> None:
    architecture, settings = OTHERS[name]
    kind = getattr(transformers, architecture)
    config = kind.config_class(**settings)
    with pytest.raises(UnsupportedError, match=f"{name}.* does not: {OWN[name]} computes it on its own"):
        kind._from_config(config, attn_implementation=fgen)
    model = kind._from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedError, match=f"{architecture} does not: {OWN[name]}"):
        door.check(model)
    model.config._attn_implementation_internal = fgen  # as if it had been made before `register`
    with pytest.raises(UnsupportedError, match=f"{OWN[name]} computes it on its own"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_models_that_choose_a_class_by_the_name_are_refused_by_name(fgen: str) -> None:
    config = transformers.SamVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UnsupportedError, match=r"sam_vision_model.* from its own SAM_VISION_ATT"):
        transformers.SamVisionModel._from_config(config, attn_implementation=fgen)


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Linear does not: it has no attention"):
        door.check(torch.nn.Linear(2, 2))


CALLS = {
    "weights": ({"output_attentions": True}, "output_attentions needs"),
    "keys that an indexer chose": ({"indices": torch.zeros(1, 4, 2, dtype=torch.int64)}, "sees as indices"),
    "blocks that an indexer chose": ({"block_indices": torch.zeros(1, 4, 2)}, "sees as block_indices"),
    "a sink of each query": ({"sinks": torch.zeros(1, 2, 4, 1)}, "a sink of each query as sinks"),
    "a mask of integers": ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.int64)}, "attention_mask of a layer"),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_what_is_not_computed_is_refused(case: tuple[dict[str, Any], str], fgen: str) -> None:
    arguments, message = case
    with pytest.raises((UnsupportedError, WorkloadError), match=message):
        LLAMA.made(fgen, torch.float32)(torch.ones(1, 4, dtype=torch.long), **arguments)


def test_a_model_on_the_cpu_is_refused_without_the_reference() -> None:
    door.register("fgen")
    try:
        with pytest.raises(UnsupportedError, match=r"this model is on the CPU: register\(reference=True\)"):
            LLAMA.made("fgen", torch.float32)(torch.ones(1, 4, dtype=torch.long))
    finally:
        door.unregister("fgen")


@pytest.mark.parametrize("name", ["", "eager", "sdpa", "flashgen", "paged|fgen", 3])
def test_names_that_transformers_takes_for_others_are_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="name"):
        door.register(name)


def test_registering_is_taken_back_without_a_trace() -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    def state() -> tuple[dict[str, Any], dict[str, Any], Any]:
        switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
        choice = transformers.PreTrainedModel.get_correct_attn_implementation
        return dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping), (switch, choice)

    before = state()
    door.register()
    door.register()
    door.register("fgen_exact", reference=True)
    assert state() != before
    door.unregister("fgen_exact")
    door.unregister()
    assert state() == before
    with pytest.raises(WorkloadError, match="name was registered by flashgen, got 'sdpa'"):
        door.unregister("sdpa")
