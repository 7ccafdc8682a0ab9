"""Which of flashgen's calls serves what, and that it gets no mask where it needs none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, GenerationConfig

from flashgen.core.errors import UnsupportedError
from tests.integrations.transformers.conftest import Calls
from tests.integrations.transformers.tiny import TINY, made

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def compared(model: Any, calls: Calls, **inputs: Any) -> None:
    """Equal logits with SDPA, which knows every mask, and eager attention where it cannot be asked."""
    with torch.no_grad():
        found = model(**inputs).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(**inputs).logits, rtol=1e-4, atol=1e-5)
        model.set_attn_implementation("fgen")


TOKENS = torch.arange(3, 25).view(2, 11)


def test_plain_causal_calls_have_no_mask(calls: Calls) -> None:
    compared(made("llama"), calls, input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS))
    assert calls.names() == {"attention"}
    assert calls.masks() == {None}
    assert all(given["causal"] for _, given in calls.seen)


def test_padding_is_a_mask_of_keys_and_a_window_stays_one(calls: Calls) -> None:
    model, inputs = made("mistral"), TINY["mistral"].called(torch.float32)
    model(**inputs)
    assert calls.masks() == {(2, 1, 1, 11)}
    assert {(given["causal"], given["window"]) for _, given in calls.seen} == {(True, (4, None))}


def test_steps_with_padding_in_front_are_steps_of_decoding(calls: Calls) -> None:
    model, inputs = made("llama"), TINY["llama"].called(torch.float32)
    model.generate(**inputs, max_new_tokens=3, do_sample=False)
    steps = [given for name, given in calls.seen if name == "attention_decode"]
    assert len(steps) == 6
    assert all(step["leftpad"].tolist() == [4, 0] for step in steps)


def test_steps_of_generation_without_padding_have_no_mask(calls: Calls) -> None:
    made("llama").generate(TOKENS, max_new_tokens=3, do_sample=False)
    assert calls.masks() == {None}
    assert [given["causal"] for _, given in calls.seen] == [True, True, False, False, False, False]


def test_some_tokens_over_a_cache_are_placed_behind_it(calls: Calls) -> None:
    model = made("mistral")
    with torch.no_grad():
        whole = model(TOKENS).logits
        first = model(TOKENS[:, :7], use_cache=True)
        rest = model(TOKENS[:, 7:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 7:], rtol=1e-4, atol=1e-5)
    assert calls.masks() == {None}


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_packed_positions_are_sequences_of_their_own(name: str, calls: Calls) -> None:
    positions = torch.tensor([[*range(4), *range(7)], [*range(9), *range(2)]])
    compared(made(name), calls, input_ids=TOKENS, position_ids=positions, use_cache=False)
    assert calls.names() == {"attention_varlen"}


def test_lengths_of_packed_sequences_are_taken_as_given(calls: Calls) -> None:
    positions = torch.tensor([[*range(4), *range(7)]])
    ends = torch.tensor([0, 4, 11], dtype=torch.int32)
    given: dict[str, Any] = {
        "use_cache": False,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 7,
        "max_length_k": 7,
    }
    model = made("mistral")
    with torch.no_grad():
        found = model(TOKENS[:1], position_ids=positions, **given).logits
        torch.testing.assert_close(
            found, model(TOKENS[:1], position_ids=positions, use_cache=False).logits, rtol=1e-4, atol=1e-5
        )
    assert calls.names() == {"attention_varlen"}
    assert all(call["tensors"][3] is ends for _, call in calls.seen[:2])


ENDS = torch.tensor([0, 4, 11], dtype=torch.int32)
LENGTHS: dict[str, Any] = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 7, "max_length_k": 7}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss", "modernbert"])
def test_lengths_divide_layers_whose_mask_knows_of_none(name: str, calls: Calls) -> None:
    """A cache, or a model without packed masks, leaves a window alone as the mask of a layer."""
    model, positions = made(name), torch.tensor([[*range(4), *range(7)]])
    with torch.no_grad():
        found = model(TOKENS[:1], position_ids=positions, **LENGTHS).logits
        assert calls.names() == {"attention_varlen"}
        alone = [model(part).logits for part in (TOKENS[:1, :4], TOKENS[:1, 4:])]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_lengths_divide_a_mask_that_is_a_tensor(dtype: torch.dtype, calls: Calls) -> None:
    """As one that a compiled model makes itself; rows of several batch elements lie one behind the other."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    ends = torch.tensor([0, 5, 8, 16], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    seen = torch.ones(8, 8, dtype=torch.bool).tril()[None, None].expand(2, 1, 8, 8)
    mask = seen if dtype == torch.bool else torch.where(seen, 0.5, -torch.inf)
    attend = AttentionInterface._global_mapping["fgen"]
    found, _ = attend(torch.nn.Identity(), q, k, v, mask, **lengths)
    expected, _ = attend(torch.nn.Identity(), q, k, v, None, **lengths)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pads", [(4, 0), (2, 5)])
def test_windows_to_both_sides_stay_behind_padding_in_front(pads: tuple[int, int], calls: Calls) -> None:
    """Few queries and padding in front look like a step of decoding, which has no window to the right."""
    mask = torch.arange(11) >= torch.tensor(pads)[:, None]
    model = made("modernbert")
    with torch.no_grad():
        found = model(TOKENS, attention_mask=mask.long()).logits
        model.set_attn_implementation("eager")
        expected = model(TOKENS, attention_mask=mask.long()).logits
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-5)


def masks_of_the_caller() -> dict[str, torch.Tensor]:
    seen = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(5)) > 0.4
    seen |= torch.eye(11, dtype=torch.bool)
    return {"bools": seen, "floats": torch.where(seen, 0.5, torch.finfo(torch.float32).min)}


@pytest.mark.parametrize("kind", ["bools", "floats"])
def test_masks_of_the_caller_say_everything(kind: str, calls: Calls) -> None:
    mask = masks_of_the_caller()
    model = made("llama")
    with torch.no_grad():
        found = model(TOKENS, attention_mask=mask[kind]).logits
        model.set_attn_implementation("sdpa")
        expected = model(TOKENS, attention_mask=mask[kind]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not any(given.get("causal") for _, given in calls.seen)


def test_models_in_training_drop_weights_by_the_seed(calls: Calls) -> None:
    model = made("gpt2").train()
    for layer in model.transformer.h:
        layer.attn.attn_dropout.p = 0.5

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        found: torch.Tensor = model(TOKENS).logits
        return found

    one, again, other = logits(0), logits(0), logits(1)
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)
    assert {given["dropout_p"] for _, given in calls.seen} == {0.5}
    calls.seen.clear()
    model.eval()(TOKENS)
    assert not any("dropout_p" in given for _, given in calls.seen)


def test_a_position_bias_of_packed_sequences_is_refused(calls: Calls) -> None:
    q = torch.zeros(1, 2, 4, 16)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    attend = AttentionInterface._global_mapping["fgen"]
    with pytest.raises(UnsupportedError, match="position bias of packed sequences"):
        attend(torch.nn.Identity(), q, q, q, None, position_bias=torch.zeros(1, 2, 4, 4), **lengths)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt-oss"])
def test_continuous_batching_generates_what_single_prompts_do(name: str, calls: Calls) -> None:
    model = made(name)
    prompts = [TOKENS[0, :8].tolist(), TOKENS[1, :3].tolist(), TOKENS[0].tolist()]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = []
    for prompt in prompts:
        found = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        expected.append(found[0, len(prompt) :].tolist())
    calls.seen.clear()
    found = model.generate_batch(prompts, settings, progress_bar=False)
    assert [one.generated_tokens for one in found.values()] == expected
    by_table = [given for name, given in calls.seen if given.get("block_table") is not None and name != "append_kv"]
    assert len(by_table) == (10 if name == "llama" else 0)  # layers times steps; windows have no tables
    assert calls.names() == {"attention_varlen", *(["append_kv"] if by_table else [])}
    assert model.config._attn_implementation == "fgen"
