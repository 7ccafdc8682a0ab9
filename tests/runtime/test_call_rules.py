"""Rules of a call that hold whatever kernel serves it: how far apart rows lie, and TF32 where a card has none."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.core.device import find_device
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops import serve
from tests.fakes.gpu import FakeGpu, OnGpu, qkv, tensor


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rows_lie_less_than_2_to_23_elements_apart(place: int, layout: str, gpu: FakeGpu) -> None:
    rows = torch.empty(2**23 + 2**6, dtype=torch.bfloat16).as_subclass(OnGpu)
    far = rows.as_strided((1, 1, 2, 64), (0, 0, 2**23, 1))
    near = rows.as_strided((1, 1, 2, 64), (0, 0, 2**23 - 8, 1))
    for given, message in ((far, "less than 8388608 elements apart, got {} with 8388608 between rows"), (near, None)):
        tensors = [tensor(1, 1, 2, 64), tensor(1, 1, 2, 64), tensor(1, 1, 2, 64)]
        tensors[place] = given
        q, k, v = (x.transpose(1, 2) if layout == "bshd" else x for x in tensors)
        if message is None:
            flashgen.attention(q, k, v, layout=layout)
            continue
        name = "qkv"[place]
        with pytest.raises(
            WorkloadError, match=message.format(name) + rf"; {name}\.contiguous\(\) brings them together"
        ):
            flashgen.attention(q, k, v, layout=layout)
    assert len(gpu.planned) == 1


def test_one_row_has_no_distance(gpu: FakeGpu) -> None:
    q = tensor(1, 1, 1, 64).as_strided((1, 1, 1, 64), (0, 0, 2**40, 1))
    flashgen.attention(q, tensor(1, 1, 8, 64), tensor(1, 1, 8, 64))
    assert len(gpu.planned) == 1


@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}])
def test_products_are_exact_where_a_card_has_no_tf32(
    features: dict[str, float], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "device_at", lambda index: find_device("gfx1200"))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        q, k, v = (x.float() for x in qkv())
        flashgen.attention(q, k, v, **features)
        assert gpu.planned[-1][0].dtype == "fp32"
        assert flashgen.explain(q, k, v, **features).workload.dtype == "fp32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
