"""`flashgen.integrate` on a GPU: models as exact as with their own attention, each layer counted, and one search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

import flashgen
from tests.tiny_models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TINY = {model.name: model for model in MODELS}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 3 * 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    flashgen.reload()
    yield
    flashgen.reload()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bert", "whisper"])
def test_models_of_transformers_are_as_exact_and_every_layer_is_told(name: str) -> None:
    made = TINY[name].made("sdpa" if name != "gpt-oss" else "eager", torch.bfloat16, "cuda")
    found = flashgen.integrate(made, TINY[name].called(torch.bfloat16, "cuda"), training=True, limit_s=0)
    assert (found.proof.status, found.is_routed) == ("equal", True), str(found)
    assert found.proof.gradients
    assert {row.record.workload.direction for row in found.rows} == {"forward", "backward"}
    assert all(row.layers and row.record.rung for row in found.rows), str(found)
    found.undo()


def test_a_module_is_tuned_for_what_it_calls() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).to("cuda", torch.bfloat16)
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    found = flashgen.integrate(model, x, limit_s=30.0, budget="4")
    (row,) = found.rows
    assert (row.layers, row.record.calls, row.miss_ms) == (("0", "1"), 2, 0.0), str(found)
    assert row.record.rung in (3, 4)
    assert (found.proof.status, dict(found.passed_on)) == ("equal", {}), str(found)
