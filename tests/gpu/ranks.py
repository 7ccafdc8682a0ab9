"""Two processes with NCCL, a GPU each: a sequence in parts against the whole one in float64.

python -m tests.gpu.ranks FOLDER
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import flashgen
from flashgen import reference
from flashgen.integrations.torch import context_parallel_attention, split_sequence

RANKS, S = 2, 1024
ROUNDING = 2**-9
"""Of a bfloat16, relative."""
CASES: list[dict[str, Any]] = [{"causal": True}, {"window": (200, 100)}]


def compare(rank: int, given: dict[str, Any], **named: Any) -> None:
    """Compare this rank's part with the whole, by twice the errors of one call."""
    import torch.distributed as dist

    torch.manual_seed(0)
    shapes = [(1, heads, S, 128) for heads in (8, 2, 2)]
    whole = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in whole]
    exact = reference.attention(*wide, **given)
    exact_all = [exact.detach(), *torch.autograd.grad(exact, wide, dout.double())]
    out = flashgen.attention(*whole, **given)
    single = [out.detach(), *torch.autograd.grad(out, whole, dout)]
    order = named["order"]
    mine = [split_sequence(x.detach(), rank, RANKS, order=order).requires_grad_() for x in whole]
    found = context_parallel_attention(*mine, dist.group.WORLD, **given, **named)
    grads = torch.autograd.grad(found, mine, split_sequence(dout, rank, RANKS, order=order).contiguous())
    for name, part, one, other in zip(
        ("out", "dq", "dk", "dv"), (found.detach(), *grads), single, exact_all, strict=True
    ):
        bound = 2 * float((one.double() - other).abs().max()) + 1e-3
        if named["method"] == "ring" or name in ("dk", "dv"):
            # parts are rounded before they are summed, and the sum is
            bound += (RANKS + 1) * ROUNDING * float(other.abs().max())
        error = float((part.double() - split_sequence(other, rank, RANKS, order=order)).abs().max())
        assert error <= bound, f"rank {rank}, {given}, {named}: {name} is {error} off, {bound} at most"


def main(rank: int, folder: str) -> None:
    """One rank."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    for given in CASES:
        for method in ("all_gather", "ring"):
            for order in ("consecutive", "zigzag"):
                compare(rank, given, method=method, order=order)
    dist.destroy_process_group()


if __name__ == "__main__":
    started = [multiprocessing.get_context("spawn").Process(target=main, args=(n, sys.argv[1])) for n in range(RANKS)]
    for process in started:
        process.start()
    # the other one would wait for a rank that has failed
    wait([process.sentinel for process in started])
    for process in started:
        process.join(None if all(not each.exitcode for each in started) else 5)
        process.kill()
    sys.exit(max(abs(process.exitcode or 0) for process in started))
