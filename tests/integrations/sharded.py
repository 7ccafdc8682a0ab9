"""Calls with DTensors on two ranks: sharded over heads and over the batch, against the whole in one process."""

from __future__ import annotations

from typing import Any

import torch

import flashgen
from flashgen.integrations.torch import register_sharding_rules
from tests.integrations.ops_on_cpu import ops_on_cpu

Tensor = torch.Tensor
B, H, HK, S, D = 2, 4, 2, 6, 8


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def case(
    q_dim: int, given: dict[str, Any], *, layout: str = "bhsd", heads_k: int = HK, rows: int = S
) -> dict[str, Any]:
    """A call, and the dimension of q, k and v that is sharded."""
    shapes = [(B, heads, rows, D) for heads in (H, heads_k, heads_k)]
    shapes = [(b, s, h, d) if layout == "bshd" else (b, h, s, d) for b, h, s, d in shapes]
    return {"inputs": [randn(*shape, seed=n) for n, shape in enumerate(shapes)], "dim": q_dim, "given": given}


CASES = {
    "batch": case(0, {"causal": True}),
    "heads": case(1, {"causal": True, "softmax_scale": 0.3}),
    "heads behind rows": case(2, {"layout": "bshd", "window": (3, 0)}, layout="bshd"),
    "sinks and a bias of heads": case(1, {"sinks": randn(H), "bias": randn(H, S, S)}),
    "sinks and a bias of a batch": case(0, {"sinks": randn(H), "bias": randn(B, 1, S, S)}),
    "a bias that all share": case(0, {"bias": randn(H, S, S), "alibi_slopes": randn(H).abs()}),
    "slopes and a mask": case(1, {"alibi_slopes": randn(B, H).abs(), "mask": randn(B, 1, 1, S) > -0.5}),
    "one head of keys": case(1, {"causal": True}, heads_k=1),
    "square": case(1, {"causal": True}, heads_k=H, rows=H),
    "square, of the same shapes with rows sharded": case(1, {"causal": True, "layout": "bshd"}, heads_k=H, rows=H),
}
EVEN = {name: name not in ("one head of keys", "square, of the same shapes with rows sharded") for name in CASES}
"""Whether a call is sharded as its inputs are; else it is gathered."""

GRADIENTS = ("sinks", "bias")


def compare() -> None:
    """Compare every case with the whole in one process; on each of two ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    register_sharding_rules()
    register_sharding_rules()
    with ops_on_cpu():
        for name, asked in CASES.items():
            whole = [x.clone().requires_grad_() for x in asked["inputs"]]
            others = {
                key: x.clone().requires_grad_(key in GRADIENTS) if isinstance(x, Tensor) else x
                for key, x in asked["given"].items()
            }
            wanted = [*whole, *(others[key] for key in GRADIENTS if key in others)]
            expected = flashgen.attention(*whole, **others)
            weights = randn(*expected.shape, seed=9)
            grads = torch.autograd.grad((expected * weights).sum(), wanted)
            place = Shard(asked["dim"])
            mine = [_distributed(x, mesh, place if x.shape[asked["dim"]] > 1 else Replicate()) for x in whole]
            own = {key: _distributed(x, mesh, Replicate()) if isinstance(x, Tensor) else x for key, x in others.items()}
            found = flashgen.attention(*mine, **own)
            assert found.placements == ((place,) if EVEN[name] else (Replicate(),)), (name, found.placements)
            torch.testing.assert_close(found.full_tensor(), expected, msg=name)
            seed = distribute_tensor(weights, mesh, found.placements)
            leaves = [*mine, *(own[key] for key in GRADIENTS if key in own)]
            for one, other in zip(torch.autograd.grad(found, leaves, seed), grads, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, msg=name)
            with torch.no_grad():
                again, lse = flashgen.attention(*mine, **own, return_lse=True)
                torch.testing.assert_close(again.full_tensor(), expected, msg=name)
                assert lse.shape[:2] == (B, H)


def compare_packed() -> None:
    """Packed sequences by heads, on each of two ranks; sharded over their rows, they are gathered."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole = [randn(10, heads, D, seed=n).requires_grad_() for n, heads in enumerate((H, HK, HK))]
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    given: dict[str, Any] = {"max_seqlen_q": 6, "max_seqlen_k": 6, "causal": True}
    with ops_on_cpu():
        expected = flashgen.attention_varlen(*whole, ends, ends, **given)
        grads = torch.autograd.grad(expected.square().sum(), whole)
        lengths = _distributed(ends, mesh, Replicate())
        for dim in (1, 0):
            mine = [_distributed(x, mesh, Shard(dim)) for x in whole]
            found = flashgen.attention_varlen(*mine, lengths, lengths, **given)
            assert found.placements == ((Shard(1),) if dim else (Replicate(),)), found.placements
            torch.testing.assert_close(found.full_tensor(), expected)
            own = torch.autograd.grad(found.square().sum(), mine)
            for one, other in zip(own, grads, strict=True):
                torch.testing.assert_close(one.full_tensor(), other)


def compare_dropout() -> None:
    """Calls that draw a state of their own, on each of two ranks with other generators: all drop the same weights."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    register_sharding_rules()
    torch.manual_seed(dist.get_rank())
    whole = [randn(B, heads, S, D, seed=n) for n, heads in enumerate((H, HK, HK))]
    rows = [randn(10, heads, D, seed=n) for n, heads in enumerate((H, HK, HK))]
    with ops_on_cpu():
        ends = _distributed(torch.tensor([0, 4, 10], dtype=torch.int32), mesh, Replicate())
        dense = flashgen.attention(*(_distributed(x, mesh, Shard(1)) for x in whole), dropout_p=0.5)
        mine = [_distributed(x, mesh, Shard(1)) for x in rows]
        packed = flashgen.attention_varlen(*mine, ends, ends, max_seqlen_q=6, max_seqlen_k=6, dropout_p=0.5)
        for found, without in ((dense, flashgen.attention(*whole)), (packed, None)):
            own = found.full_tensor()
            first = own.clone()
            dist.broadcast(first, 0)
            assert torch.equal(own, first)
            assert without is None or not torch.equal(own, without)


def _distributed(tensor: Tensor, mesh: Any, placement: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_(tensor.requires_grad)
