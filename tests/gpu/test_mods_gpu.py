"""User score functions and block masks on a GPU: numerics, FlexAttention beside them, time that follows the mask."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

import flashgen
from flashgen.core.errors import BuildError, WorkloadError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("generated_kernels")]

ROOT = Path(__file__).resolve().parents[2]
Mask = Callable[..., torch.Tensor]


def document(b, h, q_idx, k_idx, doc):
    return tl.load(doc + q_idx) == tl.load(doc + k_idx)


def causal(b, h, q_idx, k_idx):
    return k_idx <= q_idx


def by_head(b, h, q_idx, k_idx):
    return (k_idx <= q_idx) & ((h >= 2) | (q_idx - k_idx < 200)) & (k_idx >= 64 * b)


def prefix_lm(b, h, q_idx, k_idx, prefix):
    return (k_idx <= q_idx) | (k_idx < tl.load(prefix + b))


def nothing(b, h, q_idx, k_idx):
    return k_idx < q_idx - 100000


def relative(score, b, h, q_idx, k_idx, table):
    return score + tl.load(table + h * 4096 + k_idx - q_idx + 2048)


def capped(score, b, h, q_idx, k_idx):
    return tl.where(score > 1.0, float("-inf"), score * 0.5)


def wrong_type(b, h, q_idx, k_idx):
    return q_idx - k_idx


def indices(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, nheads, rows, keys = *q.shape[:3], k.shape[2]
    sizes = ((batch, (-1, 1, 1, 1)), (nheads, (1, -1, 1, 1)), (rows, (1, 1, -1, 1)), (keys, (1, 1, 1, -1)))
    return tuple(torch.arange(size, device=q.device).view(shape) for size, shape in sizes)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Mask | None = None, mask: Mask | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in float64, with functions written for torch."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q.double() @ keys.mT * q.shape[-1] ** -0.5
    if score is not None:
        scores = score(scores, *indices(q, k))
    if mask is not None:
        scores = scores.masked_fill(~mask(*indices(q, k)), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ values, torch.logsumexp(scores, -1)


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nheads, nheads_k, seqlen_q, seqlen_k, head_dim = shape
    torch.manual_seed(0)
    q = torch.randn(batch, nheads, seqlen_q, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, nheads_k, seqlen_k, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v


def assert_right(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(got[0].double(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got[1].double(), expected[1], atol=5e-3, rtol=1e-3)


SHAPES = [(2, 4, 2, 512, 512, 64), (2, 4, 1, 777, 1203, 128), (1, 4, 4, 1000, 300, 80)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["document", "causal", "by_head", "prefix_lm", "nothing"])
def test_masks(name: str, blocks: bool, shape: tuple[int, ...]) -> None:
    q, k, v = tensors(*shape)
    length = max(shape[3], shape[4])
    doc = torch.sort(torch.randint(0, 7, (length,), device="cuda", dtype=torch.int32))[0]
    prefix = torch.tensor([100, 333], device="cuda", dtype=torch.int32)
    mask_mod, aux, formula = {
        "document": (document, (doc,), lambda b, h, i, j: doc[i] == doc[j]),
        "causal": (causal, (), lambda b, h, i, j: j <= i),
        "by_head": (by_head, (), lambda b, h, i, j: (j <= i) & ((h >= 2) | (i - j < 200)) & (j >= 64 * b)),
        "prefix_lm": (prefix_lm, (prefix,), lambda b, h, i, j: (j <= i) | (j < prefix[b])),
        "nothing": (nothing, (), lambda b, h, i, j: j < i - 100000),
    }[name]
    found = None
    if blocks:
        heads = (shape[0], shape[1]) if name in ("by_head", "prefix_lm") else (None, None)
        found = flashgen.block_mask(mask_mod, *heads, seqlen_q=shape[3], seqlen_k=shape[4], aux=aux)
    got = flashgen.attention(q, k, v, mask_mod=mask_mod, aux=aux, block_mask=found, return_lse=True)
    assert_right(got, dense(q, k, v, mask=formula))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [False, True])
def test_scores_and_masks_together(shape: tuple[int, ...], blocks: bool) -> None:
    q, k, v = tensors(*shape)
    table = torch.randn(shape[1], 4096, device="cuda")

    def causal_of_table(b, h, q_idx, k_idx, table):
        return k_idx <= q_idx

    found = flashgen.block_mask(causal_of_table, seqlen_q=shape[3], seqlen_k=shape[4], aux=(table,)) if blocks else None
    options: dict[str, Any] = {"score_mod": relative, "mask_mod": causal_of_table, "aux": (table,), "block_mask": found}
    got = flashgen.attention(q, k, v, **options, return_lse=True)
    wide = table.double()
    expected = dense(q, k, v, lambda s, b, h, i, j: s + wide[h, j - i + 2048], lambda b, h, i, j: j <= i)
    assert_right(got, expected)


def test_a_score_that_hides() -> None:
    q, k, v = tensors(1, 2, 2, 300, 200, 64)
    got = flashgen.attention(q, k, v, score_mod=capped, return_lse=True)
    scores = q.double() @ k.double().mT / 8
    near = ((scores - 1).abs() < 1e-3).any(-1)  # which side of the threshold these fall is rounding
    expected = dense(q, k, v, lambda s, b, h, i, j: torch.where(s > 1, -math.inf, s * 0.5))
    assert (~near).any()
    assert_right((got[0][~near], got[1][~near]), (expected[0][~near], expected[1][~near]))


@pytest.mark.filterwarnings("ignore")  # it says that it is not compiled
def test_flex_attention_agrees() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = tensors(1, 4, 2, 1024, 1024, 64)
    doc = (torch.arange(1024, device="cuda") // 300).int()
    table = torch.randn(4, 4096, device="cuda")
    other = flex.flex_attention(
        q,
        k,
        v,
        score_mod=lambda score, b, h, i, j: score + table[h, j - i + 2048],
        block_mask=flex.create_block_mask(lambda b, h, i, j: doc[i] == doc[j], None, None, 1024, 1024, device="cuda"),
        enable_gqa=True,
    )

    def same(b, h, q_idx, k_idx, doc, table):
        return tl.load(doc + q_idx) == tl.load(doc + k_idx)

    def shifted(score, b, h, q_idx, k_idx, doc, table):
        return score + tl.load(table + h * 4096 + k_idx - q_idx + 2048)

    blocks = flashgen.block_mask(same, seqlen_q=1024, seqlen_k=1024, aux=(doc, table))
    out = flashgen.attention(q, k, v, score_mod=shifted, mask_mod=same, aux=(doc, table), block_mask=blocks)
    torch.testing.assert_close(out, other, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore")  # it says that it is not compiled
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flex_attention_has_the_same_gradients(blocks: bool, deterministic: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = tensors(2, 4, 2, 1000, 1000, 64)
    doc = (torch.arange(1000, device="cuda") // 170).int()

    def same(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return doc[i] == doc[j]

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    listed = flashgen.block_mask(document, seqlen_q=1000, seqlen_k=1000, aux=(doc,)) if blocks else None
    out = flashgen.attention(
        *leaves, mask_mod=document, aux=(doc,), block_mask=listed, deterministic=deterministic, return_lse=False
    )
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    others = [x.detach().float().requires_grad_() for x in (q, k, v)]
    mask = create_block_mask(same, None, None, 1000, 1000)
    flex = flex_attention(*others, block_mask=mask, enable_gqa=True)
    for one, other in zip(found, torch.autograd.grad(flex, others, dout.float()), strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()
    if deterministic:
        again = torch.autograd.grad(out, leaves, dout)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def bent_by_table(score, b, h, q_idx, k_idx, doc, table):
    bent = score / (1.0 + 0.1 * tl.abs(score))
    return bent + tl.load(table + h * 4096 + k_idx - q_idx + 2048)


def document_of_two(b, h, q_idx, k_idx, doc, table):
    return tl.load(doc + q_idx) == tl.load(doc + k_idx)


@pytest.mark.filterwarnings("ignore")  # it says that it is not compiled
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flex_attention_has_the_same_gradients_through_a_score_mod(blocks: bool, deterministic: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = tensors(2, 4, 2, 1000, 1000, 64)
    doc, table = (torch.arange(1000, device="cuda") // 170).int(), torch.randn(4, 4096, device="cuda")
    functions: dict[str, Any] = {"score_mod": bent_by_table, "mask_mod": document_of_two, "aux": (doc, table)}
    if blocks:
        functions["block_mask"] = flashgen.block_mask(document_of_two, seqlen_q=1000, seqlen_k=1000, aux=(doc, table))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flashgen.attention(*leaves, **functions, deterministic=deterministic, return_lse=False)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    others = [x.detach().float().requires_grad_() for x in (q, k, v)]
    flex = flex_attention(
        *others,
        score_mod=lambda s, b, h, i, j: s / (1.0 + 0.1 * s.abs()) + table[h, j - i + 2048],
        block_mask=create_block_mask(lambda b, h, i, j: doc[i] == doc[j], None, None, 1000, 1000),
        enable_gqa=True,
    )
    for one, other in zip(found, torch.autograd.grad(flex, others, dout.float()), strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()


def test_hidden_keys_that_hold_nan_do_not_reach_the_output() -> None:
    q, k, v = tensors(1, 2, 2, 500, 500, 64)

    def early(b, h, q_idx, k_idx):
        return k_idx < 130

    expected = flashgen.attention(q, k, v, mask_mod=early)
    k[:, :, 130:] = math.nan
    v[:, :, 130:] = math.inf
    blocks = flashgen.block_mask(early, seqlen_q=500, seqlen_k=500)
    for found in (None, blocks):
        torch.testing.assert_close(flashgen.attention(q, k, v, mask_mod=early, block_mask=found), expected)


def test_under_torch_compile_and_in_a_graph() -> None:
    q, k, v = tensors(1, 4, 4, 512, 512, 64)
    doc = (torch.arange(512, device="cuda") // 100).int()
    blocks = flashgen.block_mask(document, seqlen_q=512, seqlen_k=512, aux=(doc,))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q * 2, k, v, mask_mod=document, aux=(doc,), block_mask=blocks) + 1

    expected = model(q, k, v)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(q, k, v), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(q, k, v)
    doc.copy_(torch.arange(512, device="cuda") // 200)  # a replay reads what the tensor holds by then
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(out, expected)


@pytest.mark.alone
def test_time_follows_the_blocks_of_the_mask() -> None:
    length, documents = 8192, 8
    q, k, v = tensors(2, 16, 16, length, length, 128)
    doc = (torch.arange(length, device="cuda") // (length // documents)).int()
    blocks = flashgen.block_mask(document, seqlen_q=length, seqlen_k=length, aux=(doc,))
    assert blocks.sparsity() == pytest.approx(100 * (1 - 1 / documents))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sparse_ms = timed(lambda: flashgen.attention(q, k, v, mask_mod=document, aux=(doc,), block_mask=blocks))
    assert torch.cuda.max_memory_allocated() - before < 3 * q.numel() * q.element_size()
    dense_ms = timed(lambda: flashgen.attention(q, k, v))
    assert sparse_ms < 0.35 * dense_ms, f"{sparse_ms:.3f} ms of {dense_ms:.3f} ms for an eighth of the blocks"


def test_building_a_block_mask_takes_no_matrix_of_scores() -> None:
    length = 65536
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    blocks = flashgen.block_mask(causal, seqlen_q=length, seqlen_k=length)
    assert blocks.sparsity() == pytest.approx(50, abs=1)
    assert torch.cuda.max_memory_allocated() - before < 64 * (length // 128) ** 2


def timed(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[10:])  # of a GPU that other tests use, too: the call that met them least


def test_errors_name_the_rule() -> None:
    q, k, v = tensors(1, 2, 2, 300, 300, 64)
    blocks = flashgen.block_mask(causal, seqlen_q=300, seqlen_k=299)
    with pytest.raises(WorkloadError, match="seqlen_q 300 and seqlen_k 299 in a call with 300 and 300"):
        flashgen.attention(q, k, v, mask_mod=causal, block_mask=blocks)
    with pytest.raises(BuildError, match="mask_mod returns booleans"):
        flashgen.attention(q, k, v, mask_mod=wrong_type)
    with pytest.raises(BuildError, match="wrong_type"):
        flashgen.block_mask(wrong_type, seqlen_q=300, seqlen_k=300)
    with pytest.raises(WorkloadError, match="a block mask belong to a score_mod or a mask_mod, got neither"):
        flashgen.attention(q, k, v, block_mask=blocks)


def test_explain_names_the_functions() -> None:
    q, k, v = tensors(1, 2, 2, 300, 300, 64)
    assert "mask_mod causal (" in str(flashgen.explain(q, k, v, mask_mod=causal))


def test_the_page_runs(tmp_path: Path) -> None:
    """Every example of docs/score-mods.md, in order, as one program."""
    page = (ROOT / "docs" / "score-mods.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "out (1, 8, 2048, 64)" in done.stdout


def learned(score, b, h, q_idx, k_idx, table, slopes):
    return score * tl.load(slopes + h) + tl.load(table + h * 2048 + k_idx - q_idx + 1024)


def test_tables_that_a_score_mod_loads_from_are_learned() -> None:
    """Against autograd in float64, in a dense call and in packed sequences of the same lengths."""
    generator = torch.Generator("cuda").manual_seed(4)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_()

    q, k, v = random(2, 4, 300, 64), random(2, 2, 300, 64), random(2, 2, 300, 64)
    table, slopes = random(4, 2048, dtype=torch.float32), random(4)
    dout = torch.randn(q.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    place = torch.arange(300, device="cuda")
    wide = [one.detach().double().requires_grad_() for one in (q, k, v, table, slopes)]
    s = wide[0] @ wide[1].repeat_interleave(2, 1).mT * 0.125 * wide[4].view(4, 1, 1)
    s = s + wide[3][:, place - place[:, None] + 1024]
    s = s.masked_fill(place > place[:, None], -math.inf)
    out = torch.softmax(s, -1) @ wide[2].repeat_interleave(2, 1)
    right = torch.autograd.grad(out, wide, dout.double())

    dense = flashgen.attention(q, k, v, causal=True, score_mod=learned, aux=(table, slopes))
    found = [torch.autograd.grad(dense, (q, k, v, table, slopes), dout)]
    rows, ends = (one.transpose(1, 2).flatten(0, 1) for one in (q, k, v)), torch.tensor([0, 300, 600]).int().cuda()
    packed = flashgen.attention_varlen(
        *rows, ends, max_seqlen_q=300, causal=True, score_mod=learned, aux=(table, slopes)
    )
    found.append(torch.autograd.grad(packed, (q, k, v, table, slopes), dout.transpose(1, 2).flatten(0, 1)))
    for gradients in found:
        for one, other in zip(gradients, right, strict=True):
            assert float((one.double() - other).abs().max()) <= 2e-2 * float(other.abs().max())
