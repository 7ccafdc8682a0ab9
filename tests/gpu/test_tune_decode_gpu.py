"""Tune a step of decoding, then decode, on a GPU: the record serves, is right on all lengths, and nothing compiles."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.codegen import build
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.launch.gpu import current_device
from flashgen.measure.decode_case import decode_problem
from flashgen.measure.verify import Errors, check
from flashgen.runtime.decode import plans
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.ops import serve
from tests.gpu.command import run

pytestmark = pytest.mark.gpu

STEPS = ("dec-b16-h32-hk8-sk4096-d128", "dec-b8-h16-hk2-sq2-sk1000-d64-page16-causal-sink-wl300")


@pytest.mark.parametrize("key", STEPS)
def test_the_record_of_a_search_serves_all_lengths(key: str, database: Path) -> None:
    workload, device = Workload.parse(key), current_device()
    done = run("tune", "--shape", key, "--budget", "8", "--json", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    with Store.open(database, read_only=True) as store:
        record = store.record(workload, device)
    assert record is not None
    assert record.measurement is not None
    assert list(record.measurement.profile_ms) == ["ramp", "tail"]
    flashgen.reload()
    for profile in workload.profiles:
        case = decode_problem(profile, 1, 3, torch.device("cuda"))
        t = case.tensors[0]
        options = {"block_table": t.table, "causal": workload.causal, "sinks": t.features.sinks}
        out, lse = flashgen.attention_decode(
            t.q, t.k, t.v, t.lens, window=t.features.window, return_lse=True, **options
        )
        assert isinstance(check(out.transpose(1, 2), lse, case.expected), Errors), profile.key
    spec = workload.specialization
    served = explain(workload, spec, device, serve.records()).served
    assert served.rung == 3
    assert (spec, served.config, 0) in plans.PLANS


def test_nothing_compiles_after_a_warm_up(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashgen.warmup(["dec-b16-h32-hk8-sk4096-d128"])

    def refused(*given: object) -> None:
        raise AssertionError(f"compiled: {given[:2]}")

    monkeypatch.setattr(build, "compile_kernel", refused)
    chance = random.Random(1)
    cache = torch.randn(16, 4096, 8, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            batch, keys = chance.randint(1, 16), chance.randint(1, 4096)
            q = torch.empty(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
            lens = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
            part, split = cache[:batch, :keys], chance.choice([None, 1024])
            flashgen.attention_decode(q, part, part, lens, fixed_split_size=split)
    finally:
        torch.cuda.set_sync_debug_mode("default")
