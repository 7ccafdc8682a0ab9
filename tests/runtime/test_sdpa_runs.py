"""Calls that torch's attention computes: which it may, and the strides of their outputs."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.launch.sdpa import BACKENDS
from flashgen.runtime.lookup.handover import SDPA_IMPLS
from flashgen.runtime.ops import outputs, runs
from tests.fakes.gpu import FakeGpu, OnGpu, tensor
from tests.runtime.ladders import Ladder, config, faster, measured


def test_what_sdpa_computes_otherwise_stays_with_the_kernel(
    gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder.user(measured(config=config(8, "pointer"), baselines=faster("sdpa-cudnn")))
    used: list[dict[str, object]] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **given: used.append(given) or (lambda *call: call[0]))
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True, return_lse=True)
    flashgen.attention(q, k, v, causal=True, q_offset=0)
    flashgen.attention(q, k, v, causal=True, q_offset=torch.zeros(4, dtype=torch.int32).as_subclass(OnGpu))
    assert (len(gpu.launched), used) == (3, [])
    flashgen.attention(q, k, v, causal=True)
    assert (len(gpu.launched), used) == (3, [{"causal": True, "bshd": False, "gqa": True}])


def test_sdpa_gets_copies_of_unaligned_tensors(gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder.user(measured(config=config(8, "pointer"), baselines=faster("sdpa-cudnn")))
    given: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **_: lambda *call: given.append(call[:3]) or call[0])
    q, k, v = (tensor(4, h, 4096, 128, shift=1) for h in (32, 8, 8))
    flashgen.attention(q, k, v, causal=True)
    assert [one.data_ptr() % 16 for one in given[0]] == [0, 0, 0]
    assert not gpu.launched


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize(("causal", "gqa"), [(False, True), (True, False)])
def test_sdpa_computes_the_same_in_the_strides_that_were_promised(causal: bool, gqa: bool, bshd: bool) -> None:
    """On a CPU the flash backend exists, too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 32, 16, generator=generator) for h in (4, 2 if gqa else 4, 2 if gqa else 4))
    scores = q @ k.repeat_interleave(4 // k.shape[1], 1).mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(4 // v.shape[1], 1)
    run = runs.sdpa_run("sdpa-flash", causal=causal, bshd=bshd, gqa=gqa)
    for swap in (False, True):
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) if swap else x for x in (q, k, v)]
        if bshd:
            given = [x.transpose(1, 2) for x in given]
        out = run(*given, 0.3, None)
        assert out.stride() == outputs.empty_output(given[0], given[2], bshd=bshd).stride()
        torch.testing.assert_close(out.transpose(1, 2) if bshd else out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("swap", [False, True])
def test_an_sdpa_output_in_other_strides_is_copied(swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 4, 32, 16, generator=torch.Generator().manual_seed(0))
    other = q.clone() if swap else q.transpose(1, 2).contiguous().transpose(1, 2)
    given = q.transpose(1, 2).contiguous().transpose(1, 2) if swap else q
    monkeypatch.setattr(runs, "scaled_dot_product_attention", lambda *arguments, **options: other)
    out = runs.sdpa_run("sdpa-flash", causal=False, bshd=False, gqa=False)(given, given, given, None, None)
    assert other.stride() != given.stride()
    assert out.stride() == given.stride()
    assert torch.equal(out, q)


def test_every_backend_has_a_name_in_the_ladder() -> None:
    assert set(BACKENDS) == set(SDPA_IMPLS)
