"""What a warm-up makes ready: whatever the ladder can return, for the lengths and the calls that it is asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.core.config import Config
from flashgen.core.errors import DeviceError, UnsupportedError, WorkloadError
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Layers
from flashgen.launch import decode_passes
from flashgen.runtime import warmup
from flashgen.runtime.lookup.ladder import resolve
from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_packed
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.ops import helpers, serve
from tests.db.samples import H100, H200, RTX_4090
from tests.fakes.gpu import FakeGpu
from tests.runtime.ladders import CAUSAL, Ladder, config, default, measured, predicted
from tests.tiers import every

KEY = "b4-h32-hk8-s4096-d128-causal"
PACKED = [default().replace(packed_heads=heads, masked_blocks="branch") for heads in (2, 4)]
"""What the default becomes where queries are short."""

FULL = "b1-h2-s64-d64"


def with_shares(*configs: Config) -> set[Config]:
    """The same with CTAs that share the keys of a tile, which serve where there are few tiles."""
    return {config.replace(split_keys=True) for config in configs}


def test_a_warm_up_makes_ready_whatever_the_ladder_can_return(gpu: FakeGpu, ladder: Ladder) -> None:
    short, long = CAUSAL.with_shape(seqlen_q=256, seqlen_k=256), CAUSAL.with_shape(seqlen_k=60_000)
    ladder.user(measured(config=config(32)), measured(short, config=config(1)), predicted(long, config=config(0)))
    ladder.user(measured(replace(CAUSAL, head_dim=64, head_dim_v=64)), measured(device=RTX_4090, config=config(1)))
    ladder.ship(measured(short, H100, config=config(0, "pointer")))
    expected = {default(), config(32), config(1), config(0), config(0, "pointer")} | with_shares(*PACKED)
    count = flashgen.warmup([KEY])
    found = {chosen for _, chosen in gpu.compiled}
    assert found == {chosen for _, chosen in gpu.loaded}
    assert expected < found
    assert count == len(found) <= len(expected) + 8, "and other tiles of these"
    assert {spec for spec, _ in gpu.compiled} == {CAUSAL.specialization}
    for shape in (CAUSAL, short, long, CAUSAL.with_shape(seqlen_k=1), CAUSAL.with_shape(seqlen_q=60)):
        assert ladder.resolve(shape).config in expected


def served_after_a_warm_up(gpu: FakeGpu, most: Workload, shapes: list[Workload]) -> set[Config]:
    """What serves these shapes, all of which a warm-up for the largest one has made ready."""
    flashgen.warmup([most])
    served = {resolve(shape, most.specialization, H200, serve.records()).config for shape in shapes}
    assert served <= {chosen for _, chosen in gpu.loaded}
    return served


@pytest.mark.parametrize(
    "key",
    every(
        2,
        [
            *(KEY, "b8-h16-s2048-d96", "fp16-b3-h12-s5000-d64-causal", "b64-h32-s197-d40-causal"),
            "b2-h20-hk4-s1500-d80-causal",
        ],
    ),
)
def test_no_smaller_batch_and_no_other_length_compiles_after_a_warm_up(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Each length has the tile that fills the SMs."""
    monkeypatch.setattr(serve, "device_at", lambda index: H200)
    most, draw = Workload.parse(key), random.Random(key)
    shapes = []
    for _ in range(400):
        batch, rows = draw.randint(1, most.batch), draw.choice([draw.randint(17, most.seqlen_q), most.seqlen_q])
        keys = draw.choice([rows, most.seqlen_k])
        shapes.append(most.with_shape(batch=batch, seqlen_q=rows, seqlen_k=keys))
    served = served_after_a_warm_up(gpu, most, shapes)
    assert len({(each.get("warpgroups", 0), each.get("block_n", 0)) for each in served}) > 1


@pytest.mark.parametrize(
    "key", ["bwd-b64-h24-hk4-sq1024-sk120-d64", "bwd-b32-h64-hk8-sq4096-sk77-d40", "bwd-b200-h12-s128-d64"]
)
def test_no_smaller_batch_over_few_keys_compiles_after_a_warm_up(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Their tiles write dq, and walk over as many heads and queries as the batch leaves them."""
    monkeypatch.setattr(serve, "device_at", lambda index: H200)
    most, draw = Workload.parse(key), random.Random(key)
    rows = (draw.choice([most.seqlen_q, draw.randint(17, most.seqlen_q)]) for _ in range(most.batch))
    shapes = [most.with_shape(batch=batch, seqlen_q=each) for batch, each in enumerate(rows, 1)]
    served = served_after_a_warm_up(gpu, most, shapes)
    assert {each["dq_conversion"] for each in served} == {"none"}
    walks = {(each["heads_per_tile"], each["query_shares"]) for each in served}
    assert len(walks) > 1 or most.seqlen_q == most.seqlen_k


def test_a_batch_that_just_fills_a_wave_does_not_compile_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the records that ship: one of few programs serves up to 21 batches, and 22 fill two waves of 132 SMs."""
    most = Workload.parse("fp16-b256-h12-s128-d64")
    with Layers.open(None) as layers:
        records = Records(layers)
        monkeypatch.setattr(serve, "records", lambda: records)
        ready = warmup._reachable(most, most.specialization, H200, None)
        found = {}
        for batch in range(1, most.batch + 1):
            shape = most.with_shape(batch=batch, seqlen_q=32, seqlen_k=128)
            found[batch] = resolve(shape, most.specialization, H200, records).config
    assert set(found.values()) <= ready
    assert len({found[batch] for batch in (21, 22, 23)}) == 3


@pytest.mark.parametrize(
    "key",
    ["b1-h20-hk4-sq512-sk8192-d96-causal", "b4-h12-hk2-sq2048-sk8192-d64-causal", "fp16-b2-h56-sq1024-sk8192-d80"],
)
def test_no_chunk_over_fewer_keys_compiles_after_a_warm_up(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """With the records that ship: keys of a chunk of a prompt grow with what came before it."""
    most = Workload.parse(key)
    spec = Specialization.of(most, offset_tensor=most.causal)
    with Layers.open(None) as layers:
        records = Records(layers)
        monkeypatch.setattr(serve, "records", lambda: records)
        ready, draw = warmup._reachable(most, spec, H200, None), random.Random(key)
        shapes = [most.with_shape(seqlen_k=keys, batch=draw.randint(1, most.batch)) for keys in range(16, 8193, 16)]
        served = {resolve(shape, spec, H200, records).config for shape in shapes}
    assert served <= ready
    assert len(served) > 2


@pytest.mark.parametrize("key", ["b64-h16-tq16384-s512-d64-varlen", "b48-h12-tq20000-s3000-d128-causal-varlen"])
def test_no_packed_batch_compiles_after_a_warm_up(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """With the records that ship: which tile serves depends on sequences, their rows and bounds."""
    most, draw = Workload.parse(key), random.Random(key)
    assert most.total_q is not None
    with Layers.open(None) as layers:
        records = Records(layers)
        monkeypatch.setattr(serve, "records", lambda: records)
        ready = warmup._reachable(most, most.specialization, H200, None)
        tiles = set()
        for _ in range(400):
            rows = draw.randint(1, most.total_q)
            longest = draw.choice([rows, draw.randint(1, rows), draw.randint(1, 64)])
            bound = min(longest, most.seqlen_q)
            batch = draw.randint(1, most.batch)
            batch = draw.choice([batch, min(most.batch, -(-rows // bound)), most.batch])
            sizes = PackedSizes.of(most)._replace(batch=batch, total_q=rows, seqlen_q=bound, seqlen_k=bound)
            found = served_packed(most.specialization, sizes, H200, records).config
            assert found in ready, sizes
            tiles.add((found.get("warpgroups", 0), found.get("block_n", 0)))
    assert len(tiles) > 1


def test_heads_that_larger_calls_pad_are_ready_in_both_forms(gpu: FakeGpu) -> None:
    flashgen.warmup(["b1-h32-s4096-d100-causal"])
    assert {spec.key for spec, _ in gpu.compiled} == {"fwd-bf16-d100-causal-unaligned", "fwd-bf16-d104-causal"}
    gpu.compiled.clear()
    flashgen.warmup(["b1-h2-s128-d36"])
    assert {spec.key for spec, _ in gpu.compiled} == {"fwd-bf16-d36-unaligned"}


def test_a_warm_up_for_lengths_takes_what_serves_them(gpu: FakeGpu, ladder: Ladder) -> None:
    short = CAUSAL.with_shape(seqlen_q=256, seqlen_k=256)
    ladder.user(measured(config=config(32)), measured(short, config=config(1)), predicted(config=config(0)))
    assert flashgen.warmup([KEY], seqlens=[256, 300, 8192]) == 2
    assert {chosen for _, chosen in gpu.compiled} == {config(32), config(1)}
    assert flashgen.warmup([CAUSAL], seqlens=[]) == 1
    assert flashgen.warmup([]) == 0
    assert len(gpu.compiled) == 2, "what is compiled stays"


def test_warmup_compiles_helpers_where_they_are_asked_for(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(helpers, "warm", lambda helper, index: warmed.append(helper.id))
    count = flashgen.warmup([KEY])
    assert warmed == []
    assert flashgen.warmup([KEY], training=True, helpers=True) > count
    assert sorted(set(warmed)) == ["append_kv", "merge_states"]
    assert len(warmed) == 9
    warmed.clear()
    monkeypatch.setattr(decode_passes, "endless", lambda index: None)
    flashgen.warmup(["dec-b2-h4-hk2-sk64-d128"], helpers=True)
    assert len(warmed) == 9, "steps of decoding need them first of all"


def test_a_warm_up_can_include_offset_tensors(gpu: FakeGpu) -> None:
    alone = flashgen.warmup([KEY])
    assert alone < flashgen.warmup([KEY, FULL], offset_tensor=True) == len(set(gpu.compiled))
    keys = sorted({spec.key for spec, _ in gpu.compiled})
    assert keys == ["fwd-bf16-d128-causal", "fwd-bf16-d128-causal-offset", "fwd-bf16-d64"]


def test_a_warm_up_leaves_out_records_that_cannot_serve(gpu: FakeGpu, ladder: Ladder) -> None:
    too_large = config().replace(block_n=256, num_stages=5)
    ladder.user(measured(config=too_large))
    flashgen.warmup([KEY])
    found = {chosen for _, chosen in gpu.compiled}
    assert found > {default()} | with_shares(*PACKED)
    assert not any(each["block_n"] == 256 for each in found)


def test_a_warm_up_of_what_nobody_supports_is_an_error(gpu: FakeGpu) -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim is 16 to \d+, not 1024"):
        flashgen.warmup(["b1-h1-s64-d1024"])
    with pytest.raises(WorkloadError, match="lacks"):
        flashgen.warmup(["b1-h1-d64"])
    assert gpu.compiled == []


def test_a_warm_up_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    serve.device_at.cache_clear()
    with pytest.raises(DeviceError, match="a GPU that torch can use is needed"):
        flashgen.warmup([KEY])


def test_configs_of_a_warm_up_are_values(gpu: FakeGpu) -> None:
    flashgen.warmup([FULL, FULL, Workload.parse(FULL)])
    assert len(gpu.compiled) == 2
    for spec, chosen in gpu.compiled:
        assert isinstance(spec, Specialization)
        assert isinstance(chosen, Config)
