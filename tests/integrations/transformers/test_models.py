"""Models with flashgen's attention and masks are as right as with eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.integrations.transformers import check
from tests.tiers import every, first
from tests.tiny_models import MODELS, Results, TinyModel, in_float64

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.filterwarnings("ignore::FutureWarning")]

GENERATING = [model for model in MODELS if model.generates]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_logits_and_gradients_are_as_exact_as_eager_ones(model: TinyModel, fgen: str) -> None:
    with in_float64():
        exact = Results.of(model, "eager", torch.float64)
    plain = Results.of(model, "eager", torch.float32)
    Results.of(model, fgen, torch.float32).check(plain, exact, torch.float32)


def generated(model: Any, inputs: dict[str, torch.Tensor], cache: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    named = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
    found = model.generate(
        **named,
        max_new_tokens=6,
        do_sample=False,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences, found.logits


@pytest.mark.parametrize("cache", first(1, ["dynamic", "static"]))
@pytest.mark.parametrize("model", GENERATING, ids=lambda model: model.name)
def test_generates_what_eager_attention_does(model: TinyModel, cache: str, fgen: str) -> None:
    made, inputs = model.made("eager", torch.float32), model.called(torch.float32)
    tokens, scores = generated(made, inputs, cache)
    made.set_attn_implementation(fgen)
    found_tokens, found_scores = generated(made, inputs, cache)
    assert torch.equal(found_tokens, tokens)
    for found, score in zip(found_scores, scores, strict=True):
        torch.testing.assert_close(found, score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", every(2, MODELS), ids=lambda model: model.name)
def test_models_that_are_served_say_so(model: TinyModel) -> None:
    assert check(model.made("eager", torch.float32)).served
