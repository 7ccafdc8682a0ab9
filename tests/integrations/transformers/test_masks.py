"""Masks are compact where they can be, and say of every key what transformers' own do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, NllbMoeConfig, masking_utils

from flashgen import reference
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.integrations.transformers.attend import Attention
from flashgen.integrations.transformers.lengths import cached_keys, packed_lengths
from flashgen.integrations.transformers.mask import CompactMask, Visible, checked_mask
from flashgen.integrations.transformers.masks import attention_mask
from flashgen.integrations.transformers.patterns import read
from flashgen.integrations.transformers.steps import StepMask

pytestmark = pytest.mark.xdist_group("transformers")

NUMBERS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 0]])
PACKED = masking_utils.packed_sequence_mask_function(NUMBERS)
CAUSAL, BOTH_WAYS = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function


def brute(visible: Visible, shape: tuple[int, ...]) -> torch.Tensor:
    """The mask of a description, one key at a time."""
    batch, _, rows, keys = shape
    left, right = visible.window
    found = torch.zeros(shape, dtype=torch.bool)
    for b in range(batch):
        for i in range(rows):
            for j in range(keys):
                place = i + int(visible.offset)
                is_near = (left is None or j >= place - left) and (right is None or j <= place + right)
                is_key = visible.keys is None or bool(visible.keys[b, j])
                is_own = visible.sequences is None or bool(visible.sequences[b, i] == visible.sequences[b, j])
                found[b, 0, i, j] = is_near and is_key and is_own
    return found


def padding(batch: int, length: int, front: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, :front] = False
    return mask


CASES = {
    "causal, padded in front": {"attention_mask": padding(2, 7, 3), "q_length": 7, "kv_length": 7},
    "a step over a cache": {"attention_mask": padding(2, 7, 3), "q_length": 1, "kv_length": 7, "q_offset": 6},
    "some tokens over a cache": {"q_length": 3, "kv_length": 7, "q_offset": 4},
    "first tokens of a static cache": {"attention_mask": padding(2, 4, 2), "q_length": 4, "kv_length": 9},
    "more tokens of a static cache": {"q_length": 3, "kv_length": 9, "q_offset": torch.tensor(4)},
    "a window": {"q_length": 7, "kv_length": 7, "mask_function": masking_utils.sliding_window_causal_mask_function(3)},
    "a window over a cache that forgets": {
        "attention_mask": padding(2, 9, 4),
        "q_length": 2,
        "kv_length": 5,
        "q_offset": 7,
        "kv_offset": 4,
        "mask_function": masking_utils.sliding_window_causal_mask_function(4),
    },
    "a window of both sides": {
        "attention_mask": padding(2, 7, 2).flip(1),
        "q_length": 7,
        "kv_length": 7,
        "mask_function": masking_utils.sliding_window_bidirectional_mask_function(2),
    },
    "cross attention": {
        "attention_mask": padding(2, 5, 2).flip(1),
        "q_length": 3,
        "kv_length": 5,
        "mask_function": BOTH_WAYS,
    },
    "packed": {"q_length": 7, "kv_length": 7, "mask_function": masking_utils.and_masks(PACKED, CAUSAL)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_compact_mask_means_what_it_is_as_a_tensor(case: dict[str, object]) -> None:
    mask = attention_mask(2, **case)  # type: ignore[arg-type]
    assert isinstance(mask, CompactMask)
    whole = masking_utils.sdpa_mask(2, **case, allow_is_causal_skip=False)  # type: ignore[arg-type]
    assert torch.equal(mask.materialized(), whole)
    assert torch.equal(brute(mask.visible, tuple(mask.shape)), whole)


def test_masks_that_hide_what_is_not_there_are_none() -> None:
    ones = torch.ones(2, 7, dtype=torch.bool)
    window = masking_utils.sliding_window_causal_mask_function
    assert attention_mask(2, 1, 7, 6, attention_mask=ones) is None
    assert attention_mask(2, 3, 7, mask_function=BOTH_WAYS, allow_is_bidirectional_skip=True) is None
    assert attention_mask(2, 7, 7, mask_function=window(6)) is not None
    assert attention_mask(2, 7, 7) is not None  # eager attention hides nothing where it is None
    assert attention_mask(2, 7, 7, allow_is_causal_skip=False) is not None
    assert attention_mask(2, 3, 7, mask_function=BOTH_WAYS, allow_is_causal_skip=False) is not None


def test_a_step_over_a_static_cache_is_a_small_tensor_for_compiled_models() -> None:
    mask = attention_mask(2, 1, 9, torch.tensor(4), attention_mask=padding(2, 5, 2), allow_is_causal_skip=False)
    assert type(mask) is torch.Tensor
    assert mask.sum((1, 2, 3)).tolist() == [3, 5]


def test_patterns_that_are_not_known_are_tensors() -> None:
    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    own = lambda b, h, q, k: k <= q  # noqa: E731
    shifted = masking_utils.or_masks(CAUSAL, BOTH_WAYS)
    for function in (chunked, own, shifted, masking_utils.and_masks(CAUSAL, own)):
        assert read(function) is None
        mask = attention_mask(2, 7, 7, mask_function=function, allow_is_causal_skip=False)
        assert type(mask) is torch.Tensor
    assert torch.equal(mask, masking_utils.sdpa_mask(2, 7, 7, allow_is_causal_skip=False))


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="transformers 5.17")
def test_windows_of_positions_are_windows_within_their_sequences_alone() -> None:
    window = masking_utils.sliding_window_causal_mask_function(2)
    shifted = masking_utils.remap_positions_for_packed_sequence(window, POSITIONS)
    assert read(shifted) is None
    mask = attention_mask(2, 7, 7, mask_function=masking_utils.and_masks(PACKED, shifted), allow_is_causal_skip=False)
    assert isinstance(mask, CompactMask)
    assert torch.equal(brute(mask.visible, tuple(mask.shape)), mask.materialized())


def test_packed_sequences_begin_where_numbers_change() -> None:
    begins, _, longest, _ = packed_lengths(Visible(window=(None, 0), sequences=NUMBERS))
    assert begins.tolist() == [0, 2, 5, 7, 8, 13, 14]
    assert longest == 5


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([[0, 0, 1, 1], [1, 1, 1, 1]], [2, 0]),
        ([[0, 1, 0, 1], [1, 1, 1, 1]], None),
        ([[1, 1, 1, 0], [1, 1, 1, 1]], None),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], [4, 0]),
    ],
)
def test_padding_in_front_is_a_number_for_each_sequence(keys: list[list[int]], expected: list[int] | None) -> None:
    found = cached_keys(Visible(window=(None, None), keys=torch.tensor(keys, dtype=torch.bool)), 4)
    assert (found if found is None else found[1].tolist()) == expected


def test_layers_with_caches_of_other_lengths_may_share_a_mask() -> None:
    visible = Visible(window=(None, None), keys=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool))
    for seqlen_k in (4, 3, 4):
        found = cached_keys(visible, seqlen_k)
        assert found is not None
        assert [each.tolist() for each in found] == [[seqlen_k, seqlen_k], [1, 0]]


def test_what_models_do_with_a_mask_happens_to_a_tensor_of_it() -> None:
    mask = attention_mask(2, 7, 7, attention_mask=padding(2, 7, 3))
    assert isinstance(mask, CompactMask)
    assert isinstance(mask[:, :, :, :7], CompactMask)
    assert isinstance(mask.detach(), CompactMask)
    assert isinstance(mask.to("cpu"), CompactMask)
    assert torch.equal(mask[:, :, 2:4, :5], mask.materialized()[:, :, 2:4, :5])
    assert torch.equal(~mask, ~mask.materialized())
    assert torch.equal(mask & mask, mask.materialized())
    assert "window=(None, 0)" in repr(mask)
    with pytest.raises(UnsupportedError, match="adds its mask to scores"):
        torch.zeros(2, 4, 7, 7) + mask


@pytest.mark.parametrize(
    "mask", [torch.ones(7), torch.ones(1, 2, 1, 7, 7), torch.ones(2, 1, 7, 7, dtype=torch.int64), "causal"]
)
def test_masks_that_say_nothing_are_refused(mask: object) -> None:
    with pytest.raises(WorkloadError, match="attention_mask of a layer has bools or floats, in two to four dimensions"):
        checked_mask(mask)


def test_masks_are_those_that_models_get() -> None:
    """transformers hands over what this function needs, by the names that it takes."""
    config = LlamaConfig(attn_implementation="eager")
    found = masking_utils.create_causal_mask(config, torch.zeros(2, 7, 4), padding(2, 7, 3), None)
    whole = attention_mask(2, 7, 7, attention_mask=padding(2, 7, 3)).materialized()  # type: ignore[union-attr]
    assert torch.equal(found == 0, whole)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses what torch deprecates
@pytest.mark.parametrize(
    ("kind", "may_be_none"),
    [
        (LlamaConfig, True),
        (NllbMoeConfig, False),  # has no SDPA, so its modules need not say that they are causal
        (Gemma4TextConfig, False),  # asks for the name "sdpa" before it leaves queries out
    ],
)
def test_a_graph_has_none_for_a_causal_mask_where_models_read_it_so(kind: Any, may_be_none: bool) -> None:
    config = kind()

    def masked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x + 1, attention_mask(2, 7, 7, config=config)

    torch._dynamo.reset()
    _, mask = torch.compile(masked, backend="eager", fullgraph=True)(torch.zeros(1))
    assert (mask is None) == may_be_none
    if mask is not None:
        assert torch.equal(mask, masking_utils.sdpa_mask(2, 7, 7, allow_is_causal_skip=False))


def test_packed_sequences_with_padding_are_a_tensor() -> None:
    keys = padding(2, 7, 3)
    function = masking_utils.and_masks(PACKED, CAUSAL)
    mask = attention_mask(2, 7, 7, attention_mask=keys, mask_function=function)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, masking_utils.sdpa_mask(2, 7, 7, attention_mask=keys, mask_function=function))
    assert isinstance(attention_mask(2, 7, 7, attention_mask=keys | True, mask_function=function), CompactMask)


def by_a_part(mask: torch.Tensor) -> None:
    mask[..., :3] = False


def at_once(mask: torch.Tensor) -> None:
    mask.masked_fill_(torch.arange(mask.shape[-1]) < 3, False)


@pytest.mark.parametrize("change", [by_a_part, at_once])
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_a_model_writes_to_is_what_it_has_written(change: Any, queries: int, mode: Any) -> None:
    batch = 2 if queries == 1 else 1  # masks of several are expanded, and torch refuses to write to such
    q, k = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, 7, 8)
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    attend = Attention(calls=reference, is_reference=True)
    with mode():
        offset = 7 - queries
        mask, right = (make(batch, queries, 7, q_offset=offset, allow_is_causal_skip=False) for make in MAKERS)
        assert type(mask) is (CompactMask if queries > 1 else StepMask)
        right = right.expand(batch, 1, queries, 7).clone()
        for one in (mask, right):
            change(one)
        found, _ = attend(module, q, k, k, mask)
        expected, _ = attend(module, q, k, k, right)
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, attend(module, q, k, k, MAKERS[0](batch, queries, 7, q_offset=offset))[0])


MAKERS: tuple[Any, ...] = (attention_mask, masking_utils.sdpa_mask)
