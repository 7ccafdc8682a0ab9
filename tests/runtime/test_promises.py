"""What torch is promised of outputs, on fake and meta tensors: shapes, strides, dtypes and devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.runtime.ops import outputs

INPUTS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "contiguous": lambda: (_at(2, 6, 10, 64), _at(2, 3, 7, 64), _at(2, 3, 7, 64)),
    "transposed": lambda: (
        _at(2, 10, 6, 64).transpose(1, 2),
        _at(2, 7, 3, 64).transpose(1, 2),
        _at(2, 7, 3, 64).transpose(1, 2),
    ),
    "head_dim_v": lambda: (_at(2, 6, 10, 64), _at(2, 3, 7, 64), _at(2, 3, 7, 32)),
    "transposed, head_dim_v": lambda: (_at(2, 10, 6, 64).transpose(1, 2), _at(2, 3, 7, 64), _at(2, 3, 7, 128)),
    "packed": lambda: tuple(_at(2, 10, 3, 6, 64)[:, :, i].transpose(1, 2) for i in range(3)),  # type: ignore[return-value]
    "padded rows": lambda: (_at(2, 6, 10, 65)[..., 1:], _at(2, 3, 7, 64), _at(2, 3, 7, 64)),
    "one head": lambda: (_at(2, 10, 1, 64).transpose(1, 2), _at(2, 1, 7, 64), _at(2, 1, 7, 48)),
    "expanded": lambda: (_at(1, 6, 10, 64).expand(2, 6, 10, 64), _at(2, 3, 7, 64), _at(2, 3, 7, 64)),
    "empty": lambda: (_at(0, 6, 10, 64), _at(0, 3, 7, 64), _at(0, 3, 7, 64)),
}


def _at(*shape: int, device: str | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_what_is_promised_is_what_is_allocated(name: str, bshd: bool) -> None:
    """torch.compile builds on the shapes and strides of the fakes; a real call has to keep them."""
    q, k, v = INPUTS[name]()
    if bshd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = outputs.empty_output(q, v, bshd=bshd), outputs.empty_lse(q, bshd=bshd)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.stride(3) == 1
    layout = "bshd" if bshd else "bhsd"
    with FakeTensorMode():
        q, k, v = INPUTS[name]()
        if bshd:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        fake, fake_lse = flashgen.attention(q, k, v, layout=layout, return_lse=True)
        alone = flashgen.attention(q, k, v, layout=layout)
        assert isinstance(alone, torch.Tensor)
    for promised in (fake, alone):
        assert (promised.shape, promised.dtype) == (out.shape, out.dtype)
        assert promised.stride() == out.stride() or out.numel() == 0  # empty_like itself promises others for nothing
    assert fake_lse.shape == (q.shape[0], q.shape[2 if bshd else 1], q.shape[1 if bshd else 2]) == lse.shape
    assert (fake_lse.stride(), fake_lse.dtype) == (lse.stride(), torch.float32)


def test_an_output_keeps_the_memory_order_of_q() -> None:
    """So that the reshape after it, to (batch, seqlen, nheads * head_dim), costs no copy."""
    for dim in (64, 32):
        q, _, _ = INPUTS["transposed"]()
        out = outputs.empty_output(q, _at(2, 3, 7, dim), bshd=False)
        assert out.transpose(1, 2).is_contiguous()
        q, _, _ = INPUTS["contiguous"]()
        assert outputs.empty_output(q, _at(2, 3, 7, dim), bshd=False).is_contiguous()


def test_the_outputs_of_gpu_tensors_are_on_that_gpu() -> None:
    with FakeTensorMode():
        q, k = (_at(2, 10, h, 64, device="cuda:1") for h in (6, 3))
        out, lse = flashgen.attention(q, k, k, layout="bshd", causal=True, return_lse=True)
        assert (out.device, lse.device) == (torch.device("cuda", 1),) * 2
        assert (out.shape, out.stride(), lse.shape) == (q.shape, q.stride(), (2, 6, 10))


def test_meta_tensors_flow_through() -> None:
    q, k, v = (_at(2, h, 10, d, device="meta") for h, d in ((6, 64), (3, 64), (3, 32)))
    out, lse = flashgen.attention(q, k, v, causal=True, q_offset=2, softmax_scale=0.5, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 6, 10, 32), (2, 6, 10))
