"""flashgen as a backend of diffusers: its dispatcher with a real model, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashgen.core.errors import UnsupportedError
from flashgen.integrations import diffusers as door
from flashgen.integrations.torch import sdpa_arguments
from tests.integrations.ops_on_cpu import ops_on_cpu


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa_arguments, "DEVICES", ("cpu",))
    with ops_on_cpu():
        yield


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("on_cpu")
def test_it_is_sdpa_of_rows_before_heads() -> None:
    q, k, v = rows(2, 5, 4, 8), rows(2, 7, 2, 8, seed=1), rows(2, 7, 2, 8, seed=2)
    mask = rows(2, 1, 1, 7, seed=3) > -0.5
    given: dict[str, Any] = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
    found, lse = door._attend(q, k, v, **given, return_lse=True)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*turned, **given).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert lse.shape == (2, 5, 4)
    with pytest.raises(UnsupportedError, match="_parallel_config"):
        door._attend(q, k, v, _parallel_config=object())
    with pytest.raises(UnsupportedError, match=r"got torch\.float64"):
        door._attend(q.double(), k.double(), v.double())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("seqlen_q", [2, 5])
@pytest.mark.parametrize("is_bias", [False, True])
def test_masks_of_two_dimensions_are_of_keys_as_in_the_native_backend(seqlen_q: int, is_bias: bool) -> None:
    """Models hand them over so, as QwenImage does; with as many queries as batch elements, too."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = rows(2, seqlen_q, 4, 8), rows(2, 7, 4, 8, seed=1), rows(2, 7, 4, 8, seed=2)
    mask = rows(2, 7, seed=3) if is_bias else torch.arange(7) < torch.tensor([[7], [4]])
    found = door._attend(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, dispatch._native_attention(q, k, v, attn_mask=mask), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_models_are_set_to_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    door.register()
    door.register()
    assert [x.value for x in dispatch.AttentionBackendName].count("flashgen") == 1
    assert dispatch.AttentionBackendName("flashgen").name == "FLASHGEN"
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    given = {
        "hidden_states": rows(1, 16, 4),
        "encoder_hidden_states": rows(1, 6, 32),
        "pooled_projections": rows(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    with torch.no_grad():
        expected = model(**given).sample
        seen: list[tuple[int, ...]] = []
        own = door.flashgen.attention
        monkeypatch.setattr(door.flashgen, "attention", lambda **call: seen.append(call["q"].shape) or own(**call))
        model.set_attention_backend("flashgen")
        found = model(**given).sample
    assert seen == [(1, 2, 22, 16)] * 2
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
