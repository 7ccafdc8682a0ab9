"""What serves a step of decoding: records by class, the nearest one, the rule; one config for all of a class."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError, UnsupportedError
from flashgen.core.record import Measurement, TuningRecord
from flashgen.core.workload import Specialization, Workload
from flashgen.launch import decode_passes
from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.decode.shared_keys import SharedKeys, passes
from flashgen.runtime.lookup.decode_ladder import class_of, served_step
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.ladder import NEARER_ELSEWHERE
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.ops import helpers
from tests.db.samples import H100, H200, MEASURED
from tests.decoding import decode_config
from tests.fakes.gpu import FakeGpu
from tests.runtime.ladders import Ladder

Asked = tuple[Specialization, Sizes]

STEP = Workload.parse("dec-b64-h32-hk8-sk8192-d128-page16")
SPEC = STEP.specialization


def rule(workload: Workload = STEP) -> Config:
    return decode_config(workload.specialization, class_of(Sizes.of(workload)), H200)


def tuned(workload: Workload = STEP, min_tiles: int = 4, device: Device = H200) -> TuningRecord:
    """A record with the config of the rule but for one knob, which tells it from others."""
    others = () if workload.lengths or workload.batch == 1 else (("ramp", (5.0, 5.1)),)
    times = Measurement(times_ms=(9.0, 9.1), reference_ms=9.0, profile_times_ms=others)
    config = rule(workload).replace(min_tiles=min_tiles)
    return replace(MEASURED, workload=workload, device=device, config=config, baselines=(), measurement=times)


def sizes(batch: int, keys: int, queries: int = 1, heads: int = 32, heads_k: int = 8) -> Sizes:
    return Sizes(batch=batch, nheads=heads, nheads_k=heads_k, seqlen_q=queries, seqlen_k=keys)


def test_all_sizes_of_a_class_have_one_config(ladder: Ladder) -> None:
    ladder.user(tuned())
    records = ladder.records()
    for batch, keys in ((64, 8192), (33, 4097), (50, 6000)):
        served = served_step(SPEC, sizes(batch, keys), H200, records)
        assert (served.rung, served.config, served.record) == (3, tuned().config, tuned())
    assert len(records.steps) == 1, "looked up once"
    for batch, keys, queries in ((65, 8192, 1), (64, 4096, 1), (64, 8192, 2)):
        assert served_step(SPEC, sizes(batch, keys, queries), H200, records).rung == 5


def test_a_record_fits_the_rows_and_the_batch_of_those_that_it_serves(ladder: Ladder) -> None:
    few = Workload.parse("dec-b16-h32-hk8-sk8192-d128-page16")
    ladder.user(tuned(few))
    assert tuned(few).config["batch_pad"] == 16
    served = served_step(SPEC, sizes(100, 8192, queries=8), H200, ladder.records())
    assert (served.rung, served.config["batch_pad"], served.config["block_m"]) == (8, 128, 64), "too far away"
    served = served_step(SPEC, sizes(16, 8192, queries=8), H200, ladder.records())
    assert served.rung == 8
    assert "its tiles have 8 query rows, and a key head has 32" in served.skipped[2]
    served = served_step(SPEC, sizes(64, 8192, queries=2), H200, ladder.records())
    assert (served.rung, served.config["batch_pad"], served.config["min_tiles"]) == (5, 128, 4)


def test_records_of_any_lengths_and_of_the_user_come_first(ladder: Ladder) -> None:
    ladder.ship(tuned(min_tiles=8), tuned(replace(STEP, lengths="ramp"), min_tiles=2))
    assert served_step(SPEC, Sizes.of(STEP), H200, ladder.records()).config["min_tiles"] == 8
    assert served_step(SPEC, Sizes.of(STEP), H200, ladder.records()).rung == 4
    ladder.user(tuned(replace(STEP, lengths="same"), min_tiles=4))
    served = served_step(SPEC, Sizes.of(STEP), H200, ladder.records())
    assert (served.rung, served.config["min_tiles"]) == (3, 4)
    assert ladder.records().choices(SPEC, H200).here, "of pages of nearly that size, too"
    other = replace(SPEC, page_size=24)
    assert served_step(other, Sizes.of(STEP), H200, ladder.records()).config["min_tiles"] == 4
    assert served_step(replace(SPEC, page_size=64), Sizes.of(STEP), H200, ladder.records()).rung == 8


def test_another_device_of_the_architecture_is_below_this_one(ladder: Ladder) -> None:
    ladder.user(tuned(device=H100))
    assert served_step(SPEC, Sizes.of(STEP), H200, ladder.records()).rung == 6
    far = Workload.parse("dec-b1-h32-hk8-sk512-d128-page16")
    assert served_step(SPEC, Sizes.of(far), H200, ladder.records()).rung == 8


def test_a_record_of_another_device_serves_where_this_ones_is_farther_by_more_than_a_step(ladder: Ladder) -> None:
    ladder.ship(tuned(STEP.with_shape(batch=16), min_tiles=8, device=H100))
    ladder.user(tuned())
    for batch, rung in ((32, 5), (16, 6), (8, 6)):  # 1 step and 1, 2 and 0, 3 and 1
        served = served_step(SPEC, sizes(batch, 8192), H200, ladder.records())
        assert (served.rung, served.config["min_tiles"]) == (rung, 4 if rung == 5 else 8), batch
    assert served.skipped[2] == f"5. nearest record on this device: {NEARER_ELSEWHERE}"
    assert served_step(SPEC, sizes(8, 8192, queries=2), H200, ladder.records()).rung == 6, "4 steps and 2"
    ladder.user(tuned(STEP.with_shape(batch=32)))
    served = served_step(SPEC, sizes(16, 8192), H200, ladder.records())
    assert (served.rung, served.config["min_tiles"]) == (5, 4), "one step is no more than a step"


def test_bits_that_depend_on_no_batch_are_served_by_the_rule(ladder: Ladder) -> None:
    ladder.user(tuned())
    records = ladder.records()
    found = {served_step(SPEC, sizes(batch, 0), H200, records).config for batch in range(17, 129)}
    assert found == {decode_config(SPEC, sizes(64, 0), H200)}
    assert all(served.rung == 8 for served in records.steps.values())


def test_an_explicit_config_is_checked() -> None:
    records = Records.__new__(Records)
    config = rule().replace(min_tiles=8)
    assert served_step(SPEC, Sizes.of(STEP), H200, records, config).config == config
    with pytest.raises(ConfigError, match="cannot serve dec-bf16-d128-page16"):
        served_step(SPEC, Sizes.of(STEP), H200, records, config.replace(num_stages=6, block_n=128, per_sm=3))
    with pytest.raises(UnsupportedError, match="16 to 256"):
        decode_config(replace(SPEC, head_dim=512), Sizes.of(STEP), H200)


def test_explain_says_what_serves_and_how_fast_it_is_on_each_profile(ladder: Ladder) -> None:
    ladder.user(tuned())
    near = Workload.parse("dec-b40-h32-hk8-sk6000-d128-page16")
    found = explain(near, near.specialization, H200, ladder.records())
    assert found.to_dict()["record_profile_ms"] == {"ramp": 5.05}
    text = str(found)
    assert "rung       3. user database, exact" in text
    assert "GB/s of keys and values, 5.0500 ms on ramp" in text
    assert "family     hopper_decode: applies" in text
    assert "hopper_forward" not in text


def test_nothing_compiles_after_a_warm_up(gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred random calls of what was warmed: any batch, keys and queries up to it, with splits or without."""
    monkeypatch.setattr(decode_passes, "endless", lambda index: None)
    ladder.user(tuned(), tuned(Workload.parse("dec-b4-h32-hk8-sk1024-d128-page16"), min_tiles=8))
    largest = Workload.parse("dec-b64-h32-hk8-sq4-sk8192-d128-page16-causal")
    count = flashgen.warmup([largest])
    assert count == len(gpu.compiled) > 3
    ready: set[tuple[Specialization, Config]] = set(gpu.compiled)
    records, chance = ladder.records(), random.Random(7)
    for _ in range(200):
        keys = chance.choice([0, chance.randint(1, 8192)])
        asked = sizes(chance.randint(1, 64), keys, chance.randint(1, 4))
        assert (SPEC, served_step(SPEC, asked, H200, records).config) in ready, asked


def shared_passes(batch: int, queries: int, keys: int, starts: tuple[int, ...], split: int | None) -> set[Asked]:
    """What passes over shared keys of pages are looked up by: what is compiled in, and sizes."""
    pages = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16)
    q = torch.empty(batch, queries, 32, 128, dtype=torch.bfloat16)
    table, lens = torch.empty(batch, keys // 16, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    call = DecodeCall(
        q=q, k_cache=pages, v_cache=pages, seqlens=lens, block_table=table, causal=True, fixed_split_size=split
    )
    groups = len(starts)
    shared = SharedKeys(k=pages, v=pages, seqlens=lens[:groups], block_table=table[:groups], starts=starts)
    return {(one.checked.spec, one.checked.shape.sizes) for one in passes(call, shared, q)}


def test_nothing_compiles_for_a_prefix_after_a_warm_up_for_some(
    gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups by chance, of up to all sequences, with the tiles of 64 rows that they make."""
    merges: list[str] = []
    monkeypatch.setattr(decode_passes, "endless", lambda index: None)
    monkeypatch.setattr(helpers, "warm", lambda helper, index: merges.append(f"{helper.id} {helper.key}"))
    ladder.user(tuned(), tuned(Workload.parse("dec-b4-h32-hk8-sk1024-d128-page16"), min_tiles=8))
    keys = ["dec-b64-h32-hk8-sq4-sk8192-d128-page16-causal", "dec-b64-h32-hk8-sk8192-d128-page16-sink"]
    without = flashgen.warmup(keys, offset_tensor=True)
    assert not any(spec.offset_tensor for spec, _ in gpu.compiled)
    count = flashgen.warmup(keys, prefix=True)
    assert merges == ["merge_states bf16-d128-2-states"]
    ready: set[tuple[Specialization, Config]] = set(gpu.compiled)
    assert count == len(ready) + 1 > without
    records, chance = ladder.records(), random.Random(7)
    for _ in range(200):
        batch, queries, room = chance.randint(1, 64), chance.randint(1, 4), 16 * chance.randint(1, 512)
        others = chance.sample(range(1, batch), chance.randint(0, batch - 1))
        starts = chance.choice([(0,), (0, *sorted(others)), tuple(range(batch))])
        for spec, asked in shared_passes(batch, queries, room, starts, chance.choice([None, 128])):
            assert (spec, served_step(spec, asked, H200, records).config) in ready, (starts, asked)
