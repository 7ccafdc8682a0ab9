"""Arguments that transformers' own function for SDPA takes: the same numbers, to the accuracy of the dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashgen.core.errors import UnsupportedError
from flashgen.integrations.transformers.masks import attention_mask
from tests.integrations.transformers.conftest import Calls

pytestmark = pytest.mark.xdist_group("transformers")

Tensor = torch.Tensor
BATCH, HEADS, HEADS_K, ROWS, KEYS, HEAD_DIM = 2, 4, 2, 5, 7, 16


def made(rows: int = ROWS, keys: int = KEYS, batch_q: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64, whose rows lie before heads as layers have them."""
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = ((batch_q, rows, HEADS), (BATCH, keys, HEADS_K), (BATCH, keys, HEADS_K))
    q, k, v = (
        torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def layer(*, is_causal: bool) -> Any:
    return SimpleNamespace(is_causal=is_causal, num_key_value_groups=HEADS // HEADS_K)


def compared(tensors: tuple[Tensor, ...], mask: Tensor | None, *, is_causal: bool = False, **given: Any) -> None:
    """Equal outputs and gradients with transformers' own function, in float64."""
    attend = AttentionInterface._global_mapping["fgen"]
    module = layer(is_causal=is_causal)
    outs = [function(module, *tensors, mask, **given)[0] for function in (attend, sdpa_attention_forward)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), tensors) for out in outs))


@pytest.mark.usefixtures("fgen")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize(
    "shape", [(ROWS, KEYS), (1, KEYS), (ROWS, 1), (HEADS, ROWS, KEYS), (1, 1, KEYS), (HEADS, 1, KEYS)]
)
def test_masks_of_fewer_dimensions_broadcast(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    compared(made(), numbers > -1.0 if dtype == torch.bool else numbers)


@pytest.mark.usefixtures("fgen")
def test_lengths_divide_masks_of_two_dimensions() -> None:
    q, k, v = made(KEYS)
    ends = torch.tensor([0, 3, 7, 14], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    attend = AttentionInterface._global_mapping["fgen"]
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    expected, _ = attend(layer(is_causal=True), q, k, v, None, **lengths)
    for mask in (seen, torch.where(seen, 0.0, -math.inf).double()):
        torch.testing.assert_close(attend(layer(is_causal=True), q, k, v, mask, **lengths)[0], expected)


@pytest.mark.usefixtures("fgen")
@pytest.mark.parametrize("scaling", [0, 0.0, -0.0, -1, -0.3])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_factor_may_be_zero_or_below(scaling: float, rows: int) -> None:
    mask = torch.ones(rows, KEYS, dtype=torch.bool).tril(KEYS - rows)
    compared(made(rows), mask[None, None], scaling=scaling)
    compared(made(rows), None, scaling=scaling)


@pytest.mark.usefixtures("fgen")
@pytest.mark.parametrize("scaling", [0.0, -0.3])
def test_a_factor_below_zero_leaves_causal_calls_causal(scaling: float) -> None:
    """Torch's own kernel for a CPU has NaN there, and none with a mask."""
    q, k, v = made()
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool).tril()
    found, _ = AttentionInterface._global_mapping["fgen"](layer(is_causal=True), q, k, v, None, scaling=scaling)
    torch.testing.assert_close(
        found, sdpa_attention_forward(layer(is_causal=True), q, k, v, seen[None, None], scaling=scaling)[0]
    )


@torch.no_grad()
@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")])
def test_autocast_gives_steps_of_decoding_one_dtype(kinds: tuple[str, str], calls: Calls) -> None:
    """As of SDPA: layers that rotate in float32 have queries and keys of another dtype than values."""
    dtypes = [getattr(torch, kind) for kind in (kinds[0], kinds[1], "bfloat16")]
    q, k, v = (x.detach().to(dtype) for x, dtype in zip(made(1), dtypes, strict=True))
    keys = torch.ones(BATCH, KEYS, dtype=torch.bool)
    keys[0, :3] = False
    with torch.autocast("cpu", torch.bfloat16):
        mask = attention_mask(BATCH, 1, KEYS, KEYS - 1, attention_mask=keys)
        sinks = torch.full((HEADS,), -6e4, dtype=torch.float16)  # which take nothing
        found, _ = AttentionInterface._global_mapping["fgen"](layer(is_causal=True), q, k, v, mask, s_aux=sinks)
        expected, _ = sdpa_attention_forward(layer(is_causal=True), q, k, v, keys[:, None, None])
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    assert [name for name, _ in calls.seen] == ["attention_decode"]


@pytest.mark.parametrize(("is_causal", "window"), [(False, (1, 1)), (True, (1, None))])
def test_a_window_of_packed_sequences_goes_both_ways_in_encoders(
    is_causal: bool, window: tuple[int, int | None], calls: Calls
) -> None:
    q, k, v = made(KEYS)
    ends = torch.tensor([0, 4, 14], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 10, "max_length_k": 10}
    attend = AttentionInterface._global_mapping["fgen"]
    found, _ = attend(layer(is_causal=is_causal), q, k, v, None, sliding_window=2, **lengths)
    assert [given["window"] for _, given in calls.seen] == [window]
    flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]
    place, own = torch.arange(14), torch.arange(14) >= 4
    apart = place[:, None] - place
    seen = (own[:, None] == own) & (apart < 2) & (apart > (-1 if is_causal else -2))
    expected, _ = sdpa_attention_forward(layer(is_causal=is_causal), *flat, seen[None, None])
    torch.testing.assert_close(found.flatten(0, 1), expected[0])


@pytest.mark.usefixtures("fgen")
@pytest.mark.parametrize("pads", [(2, 0), (0, 0)])
@pytest.mark.parametrize("function", [masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function])
def test_learned_queries_of_a_batch_of_one_see_the_keys_of_each(function: Callable[..., Any], pads: Any) -> None:
    """Few queries and padding in front are a step of decoding."""
    keys = torch.arange(KEYS) >= torch.tensor(pads)[:, None]
    given: dict[str, Any] = {"q_offset": KEYS - 3, "mask_function": function, "attention_mask": keys}
    with torch.no_grad():
        mask = attention_mask(BATCH, 3, KEYS, **given)
        q, k, v = made(3, batch_q=1)
        found, _ = AttentionInterface._global_mapping["fgen"](layer(is_causal=False), q, k, v, mask)
        whole = masking_utils.sdpa_mask(BATCH, 3, KEYS, **given, allow_is_causal_skip=False)
        expected, _ = sdpa_attention_forward(layer(is_causal=False), q, k, v, whole)
    torch.testing.assert_close(found, expected)


def test_a_position_bias_over_a_paged_cache_is_refused(fgen: str) -> None:
    attend = AttentionInterface._global_mapping[f"paged|{fgen}"]
    with pytest.raises(UnsupportedError, match="position bias of packed sequences"):
        attend(layer(is_causal=True), *made(), None, position_bias=torch.zeros(1, HEADS, ROWS, KEYS), cache=object())
