"""Models of diffusers on kernels, in bf16: as exact as torch's attention, by the dispatcher and by SDPA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers.models.attention_dispatch")

from diffusers import FluxTransformer2DModel, UNet2DConditionModel

import flashgen
from flashgen.integrations import diffusers as door
from flashgen.integrations import torch as flashgen_torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
Tensor = torch.Tensor


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_as_exact(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """An error is at most twice that of torch's own attention in bf16, plus two units in the last place."""
    errors = [(x.double() - exact.double()).abs().max() for x in (found, plain)]
    assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max(), errors


def flux() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[16, 24, 24],
    )
    given = {
        "hidden_states": rows(2, 96, 4),
        "encoder_hidden_states": rows(2, 30, 32, seed=1),
        "pooled_projections": rows(2, 32, seed=2),
        "timestep": torch.ones(2, device=DEVICE),
        "img_ids": torch.zeros(96, 3, device=DEVICE),
        "txt_ids": torch.zeros(30, 3, device=DEVICE),
    }
    return model.eval().to(DEVICE), given


def unet() -> tuple[Any, dict[str, Tensor]]:
    """Self-attention of 64 pixels, and cross-attention to 11 words."""
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    given = {"sample": rows(2, 4, 8, 8), "encoder_hidden_states": rows(2, 11, 32, seed=1)}
    return model.eval().to(DEVICE), given | {"timestep": torch.ones(2, device=DEVICE)}


def sample(model: Any, given: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.to(dtype)(**{name: x.to(dtype) for name, x in given.items()}).sample
    return found


def counted(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[int, ...]]:
    """The shapes of q of all calls that reach flashgen through a module."""
    seen: list[tuple[int, ...]] = []
    own = module.attention

    def attention(*call: Any, **named: Any) -> Any:
        seen.append(tuple((call[0] if call else named["q"]).shape))
        return own(*call, **named)

    monkeypatch.setattr(module, "attention", attention)
    return seen


def test_a_transformer_is_set_to_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    door.register()
    model, given = flux()
    exact = sample(model, given, torch.float32)
    plain = sample(model, given, torch.bfloat16)
    seen = counted(monkeypatch, door.flashgen)
    model.set_attention_backend("flashgen")
    found = sample(model, given, torch.bfloat16)
    assert seen == [(2, 2, 126, 64)] * 2
    assert_as_exact(found, plain, exact)


def test_a_unet_is_routed_by_its_calls_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = unet()
    exact = sample(model, given, torch.float32)
    plain = sample(model, given, torch.bfloat16)
    seen = counted(monkeypatch, flashgen)
    with flashgen_torch.route_sdpa() as calls:
        found = sample(model, given, torch.bfloat16)
    assert len(seen) >= 6
    assert not calls.passed_on, calls
    assert_as_exact(found, plain, exact)
