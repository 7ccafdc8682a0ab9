"""Steps over a static cache: lengths on the device, whatever pads the prompts, in one graph of torch.compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashgen.core.errors import UnsupportedError
from flashgen.integrations.transformers.attend import Attention
from flashgen.integrations.transformers.steps import StepMask, step_mask, step_tensor
from tests.integrations.transformers.conftest import Calls
from tests.integrations.transformers.tiny import TINY, made

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.filterwarnings("ignore::FutureWarning")]

CPU = torch.device("cpu")
KEYS = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_they_are_steps_of_decoding(name: str, calls: Calls) -> None:
    model, inputs = made(name), TINY[name].called(torch.float32)
    model.generate(**inputs, max_new_tokens=4, do_sample=False, cache_implementation="static")
    steps = [given for call, given in calls.seen if call == "attention_decode" and given["tensors"][0].shape[1] == 1]
    assert len(steps) == 6
    ends = [step["tensors"][3].tolist() for step in steps]
    # the windows of mistral are caches of five keys, which are full
    assert ends == ([[12, 12]] * 2 + [[13, 13]] * 2 + [[14, 14]] * 2 if name == "llama" else [[5, 5]] * 6)
    assert {step["window"] for step in steps} == {(None if name == "llama" else 4, None)}
    assert steps[0]["leftpad"].tolist() == [4 if name == "llama" else 0, 0]


def test_their_masks_are_what_lengths_say() -> None:
    mask = step_mask(torch.tensor(4), KEYS, 1, (2, 7), CPU)
    assert isinstance(mask, StepMask)
    assert (mask.seqlens.tolist(), mask.leftpad.tolist()) == ([5, 5], [2, 0])
    assert "left=1" in repr(mask)
    whole = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    whole[..., 3:5] = True
    assert torch.equal(mask.materialized(), whole)
    assert torch.equal(mask & True, whole)
    assert isinstance(mask.detach(), StepMask)
    with pytest.raises(UnsupportedError, match="adds its mask"):
        torch.zeros(2, 1, 1, 7) + mask
    everything = step_mask(2, None, None, (1, 3), CPU)
    assert everything is not None
    assert everything.leftpad is None
    assert bool(everything.materialized().all())


def test_padding_elsewhere_is_a_mask(fgen: str) -> None:
    assert step_mask(torch.tensor(5), KEYS, None, (2, 7), CPU) is None
    model = made("llama", "eager")
    tokens, mask = torch.arange(3, 11).view(2, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(tokens, **given, cache_implementation="static")
    model.set_attn_implementation(fgen)
    assert torch.equal(model.generate(tokens, **given, cache_implementation="static"), expected)


class Traced:
    """Calls that torch.compile can trace, as it does flashgen's ops."""

    @staticmethod
    def attention_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor, **given: Any) -> Any:
        mask = step_tensor(seqlens, given["leftpad"], given["window"][0], k.shape[1])
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def test_a_compiled_step_serves_all_lengths() -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(len(inputs))
        return graph

    attend = Attention(calls=Traced, is_reference=True)

    def step(module: Any, mask: Any, *tensors: torch.Tensor) -> Any:
        return attend(module, *tensors, mask)[0]

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, keys, 16, generator=generator) for heads, keys in ((4, 1), (2, 7), (2, 7)))
    module = SimpleNamespace(is_causal=True)
    with torch.no_grad():
        for place in (4, 5, 6):
            mask = step_mask(torch.tensor(place), KEYS | (torch.arange(7) >= 5), None, (2, 7), CPU)
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.materialized(), enable_gqa=True)
            torch.testing.assert_close(compiled(module, mask, q, k, v), expected.transpose(1, 2))
    assert graphs == [5]  # q, k, v, lengths and padding
    torch._dynamo.reset()
