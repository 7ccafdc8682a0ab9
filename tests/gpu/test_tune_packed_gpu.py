"""Tune packed sequences, then attend, on a GPU: the record serves, is right on all lengths, and nothing compiles."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen import build
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.launch.gpu import current_device
from flashgen.measure.packed_case import packed_problem
from flashgen.measure.verify import Errors, check
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.mixed import launches, split_ms
from flashgen.runtime.ops import serve
from tests.gpu.command import run

pytestmark = pytest.mark.gpu

KEYS = (
    "b8-h8-hk2-tq4096-s1024-d128-causal-varlen",
    "b8-h8-tq2000-tk6000-sq500-sk1500-d64-causal-varlen-wl300-sink",
    "b8-h8-hk2-tq2000-tk9000-sq500-sk3000-d128-causal-varlen-page16",
    "b8-h8-hk2-tq2000-tk9000-sq500-sk3000-d64-varlen-wl700-page64",
    "bwd-b8-h8-hk2-tq4096-s1024-d64-causal-varlen",
)


@pytest.mark.parametrize("key", KEYS)
def test_the_record_of_a_search_serves_all_lengths(key: str, database: Path) -> None:
    workload, device = Workload.parse(key), current_device()
    done = run("tune", "--shape", key, "--budget", "8", "--json", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    with Store.open(database, read_only=True) as store:
        record = store.record(workload, device)
    assert record is not None
    assert record.measurement is not None
    assert {"ramp", "tail"} <= record.measurement.profile_ms.keys()
    flashgen.reload()
    assert explain(workload, workload.specialization, device, serve.records()).served.rung == 3
    if workload.direction == "backward":
        return  # the gate has seen its gradients
    for profile in workload.profiles:
        case = packed_problem(profile, 1, 3, torch.device("cuda"))
        i, features = case.inputs, case.inputs.features[0]
        queries, keys = features.max_seqlens
        named: dict[str, Any] = {"causal": workload.causal, "window": features.window, "sinks": features.sinks}
        q, ends = i.q[0][0].transpose(0, 1), (features.cu_seqlens_q, features.cu_seqlens_k)
        if workload.page_size:
            k, v = (one[0].transpose(1, 2) for one in (i.k, i.v))
            named |= {"block_table": features.block_table, "seqused_k": features.seqused_k}
            ends = ends[:1]
        else:
            k, v = (one[0][0].transpose(0, 1) for one in (i.k, i.v))
        out, lse = flashgen.attention_varlen(
            q, k, v, *ends, max_seqlen_q=queries, max_seqlen_k=keys, return_lse=True, **named
        )
        assert isinstance(check(out.transpose(0, 1)[None], lse[None], case.expected), Errors), profile.key


def test_nothing_compiles_and_nothing_waits_after_a_warm_up(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashgen.warmup(["b32-h8-hk2-tq8192-s2048-d128-causal-varlen"], training=True)

    def refused(*given: object) -> None:
        raise AssertionError(f"compiled: {given[:2]}")

    monkeypatch.setattr(build, "compile_kernel", refused)
    chance = random.Random(1)
    q, k = (torch.randn(8192, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    batches = [(chance.randint(1, 32), chance.randint(32, 8192)) for _ in range(200)]
    ends = [torch.linspace(0, rows, batch + 1).int().cuda() for batch, rows in batches]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for (batch, rows), one in zip(batches, ends, strict=True):
            longest = min(2048, -(-rows // batch) + 1)
            part = q[:rows].detach().requires_grad_(batch % 2 == 0)
            out = flashgen.attention_varlen(part, k[:rows], k[:rows], one, max_seqlen_q=longest, causal=True)
            if out.requires_grad:
                out.backward(part.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_mixed_batch_is_what_its_record_says(database: Path) -> None:
    key, device = "b16-h8-hk2-tq524-sq256-tk8192-sk1024-d128-causal-varlen-page16-mixed", current_device()
    done = run("tune", "--shape", key, "--budget", "6", "--json", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    workload = Workload.parse(key)
    with Store.open(database, read_only=True) as store:
        record = store.record(workload, device)
    assert record is not None
    assert split_ms(record) is not None, "two launches were timed beside the one, and were right"
    flashgen.reload()
    found = launches(workload, workload.specialization, device, serve.records())
    assert (found.record, found.are_two) == (record, (split_ms(record) or 0.0) < (record.time_ms or 0.0))
