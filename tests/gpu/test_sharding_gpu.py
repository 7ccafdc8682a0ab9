"""DTensors on a GPU: this torch's internals are those of the rules, and a call on a mesh of one is the call itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.integrations.torch import register_sharding_rules

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.tensor import init_device_mesh

    torch.cuda.set_device(0)  # a mesh asks that it was chosen
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    register_sharding_rules()
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("layout", "dim"), [("bhsd", 1), ("bhsd", 0), ("bshd", 2)])
def test_a_sharded_call_is_the_call_of_its_parts(mesh: Any, layout: str, dim: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    shapes = [(2, heads, 80, 64) if layout == "bhsd" else (2, 80, heads, 64) for heads in (8, 2, 2)]
    whole = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    sinks = torch.randn(8, device="cuda").requires_grad_()
    given: dict[str, Any] = {"layout": layout, "causal": True, "deterministic": True}
    expected = flashgen.attention(*whole, sinks=sinks, **given)
    grads = torch.autograd.grad(expected.float().square().sum(), [*whole, sinks])
    mine = [distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in whole]
    own = distribute_tensor(sinks.detach(), mesh, [Replicate()]).requires_grad_()
    found = flashgen.attention(*mine, sinks=own, **given)
    assert found.placements == (Shard(dim),)
    assert torch.equal(found.full_tensor(), expected)
    for one, other in zip(torch.autograd.grad(found.float().square().sum(), [*mine, own]), grads, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
