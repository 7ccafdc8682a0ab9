"""Numerics of the rendered kernels on a CPU, through Triton's interpreter, against a float64 oracle.

Small shapes, every feature: odd lengths, GQA, both layouts, query offsets, empty rows, padded head dimensions. bf16 is
left to the GPU tests: the interpreter keeps it in numpy, which has none.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashgen.core.workload import Specialization
from tests.interpreter.forward import compare, config_for, run, tensors
from tests.tiers import every

SHAPES = [  # batch, nheads, nheads_k, seqlen_q, seqlen_k
    (1, 1, 1, 1, 1),
    (2, 4, 2, 33, 70),
    (1, 2, 1, 64, 64),
    (1, 3, 3, 40, 17),
    (2, 2, 1, 1, 50),
]


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    offset: int | torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT * (scale if scale is not None else q.shape[-1] ** -0.5)
    if causal:
        seqlen_q, seqlen_k = scores.shape[-2:]
        shift = torch.as_tensor(seqlen_k - seqlen_q if offset is None else offset).view(-1, 1, 1, 1)
        hidden = torch.arange(seqlen_k) > torch.arange(seqlen_q)[:, None] + shift
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "loads", "layout"),
    every(
        3,
        [
            ("fp16", "descriptor", "bhsd"),
            ("fp16", "pointer", "bshd"),
            ("fp32", "pointer", "bhsd"),
            ("fp32", "descriptor", "bshd"),
        ],
    ),
)
def test_shapes_layouts_and_dtypes(shape: tuple[int, ...], causal: bool, dtype: str, loads: str, layout: str) -> None:
    spec = Specialization(direction="forward", dtype=dtype, head_dim=64, head_dim_v=64, causal=causal)
    torch_dtype = {"fp16": torch.float16, "fp32": torch.float32}[dtype]
    q, k, v = tensors(shape, 64, 64, torch_dtype, layout)
    compare(run(spec, config_for(spec, loads=loads), q, k, v), oracle(q, k, v, causal))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 128), (256, 256), (80, 80), (16, 48), (96, 64)])
@pytest.mark.parametrize("loads", ["descriptor", "pointer"])
def test_head_dimensions_are_padded_inside_the_kernel(head_dim: int, head_dim_v: int, loads: str) -> None:
    spec = Specialization(direction="forward", dtype="fp16", head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    q, k, v = tensors((1, 2, 1, 40, 50), head_dim, head_dim_v, torch.float16, "bhsd")
    compare(run(spec, config_for(spec, loads=loads), q, k, v), oracle(q, k, v, True))


@pytest.mark.parametrize("offset", [-100, -40, -3, 0, 5, 30, 1000])
def test_query_offsets(offset: int) -> None:
    """Rows that see no key have output 0 and LSE -inf, never NaN."""
    spec = Specialization(direction="forward", dtype="fp32", head_dim=16, head_dim_v=16, causal=True)
    q, k, v = tensors((1, 2, 1, 40, 70), 16, 16, torch.float32, "bhsd")
    out, lse = run(spec, config_for(spec, loads="pointer"), q, k, v, q_offset=offset)
    compare((out, lse), oracle(q, k, v, True, offset))
    empty = torch.arange(40) + offset < 0
    assert torch.all(out[:, :, empty] == 0)
    assert torch.all(lse[:, :, empty] == -math.inf)


def test_a_query_offset_for_each_sequence_comes_from_a_tensor() -> None:
    spec = Specialization(
        direction="forward", dtype="fp32", head_dim=16, head_dim_v=16, causal=True, offset_tensor=True
    )
    q, k, v = tensors((3, 2, 1, 20, 50), 16, 16, torch.float32, "bhsd")
    offset = torch.tensor([-7, 0, 33], dtype=torch.int32)
    compare(run(spec, config_for(spec, loads="pointer"), q, k, v, q_offset=offset), oracle(q, k, v, True, offset))


@pytest.mark.parametrize(("group", "heavy"), list(itertools.product((1, 8, 32, 0), (False, True))))
def test_every_program_order_computes_every_block_once(group: int, heavy: bool) -> None:
    """The order follows from a program's number alone, so that each has one of both kinds of loads."""
    spec = Specialization(direction="forward", dtype="fp16", head_dim=16, head_dim_v=16, causal=True)
    q, k, v = tensors((3, 3, 3, 70, 70), 16, 16, torch.float16, "bhsd")
    loads = "descriptor" if heavy == (group in (8, 0)) else "pointer"
    config = config_for(spec, loads=loads, heads_per_group=group, heavy_first=heavy)
    compare(run(spec, config, q, k, v), oracle(q, k, v, True))


def test_large_scores_neither_overflow_nor_lose_the_mask() -> None:
    """Masking is -inf, not a big negative number: scores far below any such number must still win over masked ones."""
    spec = Specialization(direction="forward", dtype="fp32", head_dim=16, head_dim_v=16, causal=True)
    q, k, v = tensors((1, 1, 1, 33, 33), 16, 16, torch.float32, "bhsd")
    q, k = q.abs() * 3e4, -k.abs() * 3e4
    out, lse = run(spec, config_for(spec, loads="pointer"), q, k, v, softmax_scale=1.0)
    expected = oracle(q, k, v, True, scale=1.0)
    assert expected[1].max() < -1e8
    torch.testing.assert_close(out.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], atol=0, rtol=1e-6)


def test_any_strides_with_a_contiguous_last_dimension() -> None:
    spec = Specialization(direction="forward", dtype="fp16", head_dim=16, head_dim_v=16, aligned16=False)
    base = torch.randn(2, 30, 3, 3, 17, generator=torch.Generator().manual_seed(0)).half()
    q, k, v = (base[:, :, i, :, 1:].transpose(1, 2) for i in range(3))
    k, v = k[:, :1].expand(2, 3, 30, 16), v[:, :1].expand(2, 3, 30, 16)
    compare(run(spec, config_for(spec, loads="pointer"), q, k, v), oracle(q, k, v, False))


def test_no_key_at_all() -> None:
    spec = Specialization(direction="forward", dtype="fp16", head_dim=16, head_dim_v=16)
    q, k, v = tensors((2, 2, 1, 5, 0), 16, 16, torch.float16, "bhsd")
    out, lse = run(spec, config_for(spec), q, k, v)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)
