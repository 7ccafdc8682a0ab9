"""Two processes with gloo: calls with DTensors against the whole ones in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from flashgen.integrations.torch import register_sharding_rules
from tests.integrations.ops_on_cpu import ops_on_cpu
from tests.integrations.sharded import compare, compare_dropout, compare_packed
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).parents[2]


def part(rank: int, folder: str) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    compare()
    compare_packed()
    compare_dropout()
    dist.destroy_process_group()


@EXHAUSTIVE
def test_sharded_calls_are_the_whole_ones(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    code = "import sys; from tests.integrations.test_distributed import part; part(int(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


def test_a_torch_with_other_internals_has_no_sharding_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import _op_schema

    monkeypatch.delattr(_op_schema, "RuntimeSchemaInfo")
    with pytest.raises(UnsupportedError, match=r"torch 2\.11 to 2\.13"):
        register_sharding_rules()


def test_a_mesh_of_two_dimensions_shards_batch_and_heads() -> None:
    """Four ranks that exchange nothing, of which this process is one: where a result lies follows from the rules."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        register_sharding_rules()

        def called(heads_k: int, *placements: Any) -> Any:
            rows = [torch.zeros(4, heads, 6, 8) for heads in (2 * heads_k, heads_k, heads_k)]
            mine = [DTensor.from_local(x, mesh, [Replicate()] * 2).redistribute(mesh, placements) for x in rows]
            with ops_on_cpu():
                return flashgen.attention(*mine, causal=True).placements

        assert called(2, Shard(0), Shard(1)) == (Shard(0), Shard(1))
        assert called(4, Shard(1), Shard(1)) == (Shard(1), Shard(1))
        assert called(6, Shard(1), Shard(1)) != (Shard(1), Shard(1))  # two groups for two ranks, one for the others
    finally:
        dist.destroy_process_group()
