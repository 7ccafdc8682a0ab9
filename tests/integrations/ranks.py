"""Processes with gloo, one a rank: a sequence in parts against the whole one in float64.

    python -m tests.integrations.ranks FOLDER

imports torch once and forks a process a rank; its exit code is that of the first that fails.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen import reference
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.integrations.torch import context_parallel_attention, split_sequence
from tests.integrations.ops_on_cpu import ops_on_cpu

Tensor = torch.Tensor

RANKS = 4
B, H, HK, S, D, DV = 2, 4, 2, 32, 8, 4
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal with sinks": {"causal": True, "sinks": SINKS, "softmax_scale": 0.3},
    "a window to both sides, softcap and sinks": {"window": (3, 2), "softcap": 2.0, "sinks": SINKS},
    "a window and causal": {"causal": True, "window": (5, 0), "deterministic": True},
    "a window with blocks that it leaves open": {"window": (25, 9)},
}
PAIRS = ("causal with sinks", "a window to both sides, softcap and sinks")
"""Cases in groups of two."""


def compare(group: Any, rank: int, ranks: int, names: Iterator[str]) -> None:
    """Compare output and gradients of this rank's part, for both methods and both orders."""
    for name in names:
        given = CASES[name]
        generator = torch.Generator().manual_seed(0)
        shapes = ((B, H, S, D), (B, HK, S, D), (B, HK, S, DV), (B, H, S, DV))
        *whole, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        inputs = [x.requires_grad_() for x in (*whole, *([given["sinks"].clone()] if "sinks" in given else []))]
        expected, grads = differentiated(reference.attention, inputs, weights, given)
        for order in ("consecutive", "zigzag"):
            mine = [split_sequence(x.detach(), rank, ranks, order=order).requires_grad_() for x in inputs[:3]]
            mine += [x.detach().requires_grad_() for x in inputs[3:]]
            part = split_sequence(weights, rank, ranks, order=order)
            for method in ("all_gather", "ring"):
                found, own = differentiated(
                    lambda *x, **y: context_parallel_attention(*x, group, **y),
                    *(mine, part, {**given, "method": method, "order": order}),
                )
                label = f"{name}, {method}, {order}, rank {rank} of {ranks}"
                close(found, split_sequence(expected, rank, ranks, order=order), label)
                for one, other in zip(own[:3], grads[:3], strict=True):
                    close(one, split_sequence(other, rank, ranks, order=order), label)
                for one, other in zip(own[3:], grads[3:], strict=True):
                    torch.distributed.all_reduce(one, group=group)
                    close(one, other, label)


def differentiated(attend: Any, inputs: list[Tensor], weights: Tensor, given: dict[str, Any]) -> Any:
    """The output, and the gradients of what it is made from."""
    given = {**given, **({"sinks": inputs[3]} if len(inputs) > 3 else {})}
    out = attend(*inputs[:3], **given)
    return out.detach(), torch.autograd.grad((out * weights).sum(), inputs)


def close(found: Tensor, expected: Tensor, label: str) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10, msg=lambda said: f"{label}: {said}")


def main(rank: int, folder: str) -> None:
    """One rank of four, and of two in each half of them."""
    import torch.distributed as dist

    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole, flashgen.merge_states = flashgen.merge_states, reference.merge_states
    with ops_on_cpu():
        compare(dist.group.WORLD, rank, RANKS, iter(CASES))
        compare(halves[rank // 2], rank % 2, 2, iter(PAIRS))
        empty = torch.zeros(B, H, 0, D)
        assert context_parallel_attention(empty, empty, empty, dist.group.WORLD, method="ring").shape == empty.shape
        try:
            context_parallel_attention(empty, empty, empty, halves[1 - rank // 2])
        except WorkloadError:
            pass
        else:
            raise AssertionError("a process that is not in a group is refused")
        refusals(rank)
    flashgen.merge_states = whole
    dist.destroy_process_group()


def refusals(rank: int) -> None:
    """What no rank does, in words of flashgen, and none of it on some ranks alone."""
    x = torch.ones(B, H, 4, D, requires_grad=True)
    given: dict[str, Any] = {"method": "ring", "causal": True}
    assert context_parallel_attention(x, x, x, None, **given).shape == x.shape
    ring = context_parallel_attention(x, x, x, None, **given)
    refused("first derivatives only", lambda: torch.autograd.grad(ring.sum(), x, create_graph=True))
    refused(
        "no gradient under transforms",
        lambda: torch.func.grad(lambda y: context_parallel_attention(y, y, y, None, **given).sum())(x),
    )
    refused("is of a process group", lambda: context_parallel_attention(x, x, x, "world"))
    os.environ["FLASHGEN_CHECKS"] = "1"
    settings.cache_clear()
    odd = torch.ones(B, H, 4 + rank % 2, D)
    refused("all ranks make the same calls", lambda: context_parallel_attention(odd, odd, odd, None))
    assert context_parallel_attention(x, x, x, None).shape == x.shape


def refused(words: str, call: Callable[[], object]) -> None:
    """A call is refused in such words."""
    with pytest.raises((WorkloadError, UnsupportedError), match=words):
        call()


if __name__ == "__main__":
    torch.set_num_threads(1)
    started = [multiprocessing.get_context("fork").Process(target=main, args=(n, sys.argv[1])) for n in range(RANKS)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in started))
