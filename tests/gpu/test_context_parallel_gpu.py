"""Rings of ranks with kernels: four of them in turns on one GPU, and two with NCCL where there are two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

import flashgen
from flashgen import reference
from flashgen.core.features.values import Features
from flashgen.integrations.torch import join_sequence, split_sequence
from flashgen.integrations.torch.ring import ScoreOptions, ring_backward, ring_forward
from flashgen.integrations.torch.sequence_parts import ring_steps

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
RANKS, S = 4, 512
CASES: list[tuple[str, dict[str, Any]]] = [
    ("zigzag", {"causal": True}),
    ("consecutive", {"causal": True, "window": (200, 0)}),
    ("zigzag", {"window": (90, 40), "softcap": 5.0}),
]


@dataclass
class Ring:
    """Ranks that are threads, of which one at a time computes."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    queues: dict[tuple[int, int], Queue[list[Tensor]]] = field(default_factory=lambda: defaultdict(Queue))


@dataclass
class Rank:
    """One of them."""

    ring: Ring
    rank: int
    ranks: int = RANKS
    source: int = 0

    def start(self, tensors: Sequence[Tensor], shift: int) -> Rank:
        self.ring.queues[self.rank, (self.rank + shift) % RANKS].put([x.clone() for x in tensors])
        return Rank(self.ring, self.rank, source=(self.rank - shift) % RANKS)

    def wait(self) -> list[Tensor]:
        self.ring.turn.release()
        try:
            return self.ring.queues[self.source, self.rank].get(timeout=120)
        finally:
            self.ring.turn.acquire()


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [
        float((one.detach().double() - other.detach()).abs().max()) for one, other in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize(("order", "given"), CASES)
def test_a_ring_of_kernels_is_as_exact_as_one_call(order: str, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shapes = [(2, heads, S, 128) for heads in (8, 2, 2)]
    whole = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    exact_inputs = [x.detach().double().requires_grad_() for x in whole]
    exact = reference.attention(*exact_inputs, **given)
    exact_grads = torch.autograd.grad(exact, exact_inputs, dout.double())
    out = flashgen.attention(*whole, **given)
    single = error([out, *torch.autograd.grad(out, whole, dout)], [exact, *exact_grads])

    ring = Ring()
    features = Features(window=given.get("window", (None, None)), softcap=given.get("softcap", 0.0))
    options = ScoreOptions(given.get("causal", False), None, features, False)

    def part(rank: int) -> list[Tensor]:
        q, k, v, d = (split_sequence(x.detach(), rank, RANKS, order=order).contiguous() for x in (*whole, dout))
        steps = ring_steps(order, rank, RANKS, S // RANKS, options.causal, features.window)
        with ring.turn, torch.no_grad():
            found, lse = ring_forward(q, k, v, Rank(ring, rank), steps, options)
            return [found, *ring_backward(d, q, k, v, found, lse, Rank(ring, rank), steps, options)[:3]]

    with ThreadPoolExecutor(RANKS) as pool:
        parts = list(pool.map(part, range(RANKS)))
    found = [join_sequence(ones, order=order) for ones in zip(*parts, strict=True)]
    for one, other in zip(error(found, [exact, *exact_grads]), single, strict=True):
        assert one <= 2 * other + 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus_with_nccl(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    line = [sys.executable, "-m", "tests.gpu.ranks", str(tmp_path)]
    paths = os.pathsep.join([str(root), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
