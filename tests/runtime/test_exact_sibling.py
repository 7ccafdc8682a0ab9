"""A record whose LSE is not exact serves calls without one; its exact sibling serves the others, and training."""

from __future__ import annotations

import flashgen
from flashgen.codegen.families import exact_sibling
from flashgen.core.config import Config
from tests.fakes.gpu import FakeGpu, qkv
from tests.runtime.ladders import Ladder, default, measured

CAP = {"softcap": 3.0, "causal": True}


def shipped(ladder: Ladder) -> tuple[Config, Config]:
    """A user's record with the hardware's tanh, and the exact sibling of its config."""
    workload = flashgen.explain(*qkv(), **CAP).workload
    flashgen.reload()
    config = default(workload).replace(tanh="hardware")
    ladder.user(measured(workload, config=config))
    return config, exact_sibling(config, workload.specialization)


def test_an_lse_is_computed_by_the_exact_sibling(gpu: FakeGpu, ladder: Ladder) -> None:
    hardware, exact = shipped(ladder)
    q, k, v = qkv()
    flashgen.attention(q, k, v, **CAP)
    flashgen.attention(q, k, v, **CAP, return_lse=True)
    flashgen.attention(q, k, v, **CAP, q_offset=1)
    assert [config for _, config, *_ in gpu.planned] == [hardware, exact, hardware]


def test_so_is_the_forward_pass_of_training(gpu: FakeGpu, ladder: Ladder) -> None:
    _, exact = shipped(ladder)
    q, k, v = qkv()
    flashgen.attention(q.requires_grad_(), k, v, **CAP)
    assert [config for _, config, *_ in gpu.planned] == [exact]


def test_explain_says_so(gpu: FakeGpu, ladder: Ladder) -> None:
    hardware, exact = shipped(ladder)
    alone, with_lse = (flashgen.explain(*qkv(), **CAP, return_lse=lse) for lse in (False, True))
    assert (alone.served.config, with_lse.served.config) == (hardware, exact)
    assert with_lse.served.record == alone.served.record
    assert with_lse.is_stale is alone.is_stale
    assert "measured without an LSE" in str(with_lse)
    assert "measured without an LSE" not in str(alone)


def test_a_warm_up_has_both(gpu: FakeGpu, ladder: Ladder) -> None:
    hardware, exact = shipped(ladder)
    workload = flashgen.explain(*qkv(), **CAP).workload
    flashgen.warmup([workload], seqlens=[])
    assert {config for _, config, *_ in gpu.compiled} >= {hardware, exact}
