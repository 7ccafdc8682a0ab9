"""What serves packed sequences: records by class, the nearest packed or dense one, the default; one config a class.

In fp32, so that the portable families serve on every GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.codegen.families import default_config, family, usual
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Layers
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_packed
from flashgen.runtime.lookup.records import Records
from tests.db.samples import H100, H200
from tests.fakes.gpu import FakeGpu, OnGpu
from tests.runtime.ladders import Ladder
from tests.runtime.packed_records import BATCH, SPEC, config, tuned
from tests.tiers import EXHAUSTIVE, first

SIZES = PackedSizes.of(BATCH)


def test_all_sizes_of_a_class_have_one_config(ladder: Ladder) -> None:
    ladder.user(tuned())
    records = ladder.records()
    for changes in ({}, {"batch": 9}, {"total_q": 16385}, {"seqlen_q": 4097, "seqlen_k": 5000}):
        served = served_packed(SPEC, SIZES._replace(**changes), H200, records)
        assert (served.rung, served.record) == (3, tuned())
    assert len(records.steps) == 1, "looked up once"
    for changes in ({"batch": 17}, {"total_q": 32769}, {"seqlen_q": 4096}, {"seqlen_k": 8193}):
        served = served_packed(SPEC, SIZES._replace(**changes), H200, records)
        assert (served.rung, served.config) == (5, tuned().config)


def test_every_shipped_record_of_a_profile_serves_its_workload(tmp_path: Path) -> None:
    records = Records(Layers.open([tmp_path / "none.sqlite3"]))
    shipped = [record for record, _ in records._layers.records(device=H200) if record.workload.has_profiles]
    assert {record.workload.direction for record in shipped} == {"forward", "backward", "decode"}
    for record in shipped:
        served = explain(record.workload, record.workload.specialization, H200, records).served
        assert (served.rung, served.config) == (4, record.config), record.workload.key


def test_bounds_beyond_all_rows_are_of_the_class_of_the_rows() -> None:
    short = SIZES._replace(total_q=500, seqlen_q=4000)
    assert short.largest == SIZES._replace(total_q=512, seqlen_q=512).largest


def test_records_of_any_lengths_and_of_the_user_come_first(ladder: Ladder) -> None:
    ladder.ship(tuned(stages=1), tuned(replace(BATCH, lengths="ramp"), stages=3))
    served = served_packed(SPEC, SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (4, config(1))
    ladder.user(tuned(replace(BATCH, lengths="tail"), stages=2))
    served = served_packed(SPEC, SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (3, config(2))


def test_dense_records_serve_where_no_packed_one_is_near(ladder: Ladder) -> None:
    dense = Workload.parse("fp32-b4-h32-hk8-s8192-d128-causal")
    ladder.ship(tuned(dense, stages=1))
    served = served_packed(SPEC, SIZES, H200, ladder.records())
    assert (served.rung, served.config, served.record and served.record.workload) == (5, config(1), dense)
    far = tuned(Workload.parse("fp32-b16-h32-hk8-tq1024-s128-d128-causal-varlen"), stages=3)
    ladder.user(far)
    assert served_packed(SPEC, SIZES, H200, ladder.records()).config == config(1), "a far packed one comes behind it"
    ladder.user(tuned(BATCH.with_shape(total_q=65536), stages=2))
    assert served_packed(SPEC, SIZES, H200, ladder.records()).config == config(2), "a near one before it"
    away = PackedSizes.of(Workload.parse("fp32-b16-h32-hk8-tq1024-s32-d128-causal-varlen"))
    assert served_packed(SPEC, away, H200, ladder.records()).config == config(3)


def test_dense_records_of_another_family_or_far_away_do_not(ladder: Ladder) -> None:
    backward = Specialization.parse("bwd-fp32-d128-causal-varlen")
    sizes = PackedSizes.of(replace(BATCH, direction="backward"))
    own, other = (family(f"portable_backward_{name}").default(backward, H200) for name in ("fused", "split"))
    assert default_config(backward, H200) == own
    near, far = (Workload.parse(f"bwd-fp32-b{key}-d128-causal") for key in ("4-h32-hk8-s8192", "1-h32-hk8-s64"))
    ladder.ship(tuned(far, config=own.replace(heads_per_group=1)), tuned(near, config=other))
    served = served_packed(backward, sizes, H200, ladder.records())
    assert served.rung == 8
    assert "5. nearest record on this device: no such record" in served.skipped
    ladder.user(tuned(near, config=own.replace(heads_per_group=1)))
    assert served_packed(backward, sizes, H200, ladder.records()).config == own.replace(heads_per_group=1)


def test_another_device_of_the_architecture_is_below_this_one(ladder: Ladder) -> None:
    ladder.ship(tuned(stages=1, device=H100), tuned(Workload.parse("fp32-b4-h32-hk8-s8192-d128-causal"), stages=3))
    assert served_packed(SPEC, SIZES, H200, ladder.records()).config == config(3)
    ladder.ship(tuned(BATCH, stages=2))
    assert served_packed(SPEC, SIZES, H200, ladder.records()).config == config(2)


def test_functions_are_served_by_what_is_near(ladder: Ladder) -> None:
    ladder.user(tuned(stages=1))
    source = "def later(b, h, q_idx, k_idx):\n    return q_idx >= k_idx\n"
    mods = ScoreMods(mask_mod=UserFunction(name="later", source=source))
    served = served_packed(replace(SPEC, mods=mods), SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (5, config(1))


def test_a_record_serves_with_the_heads_in_a_tile_that_sizes_ask_for(ladder: Ladder) -> None:
    """Of one head or of several: neither is a reason to pass it over."""
    grouped = Workload.parse("b64-h32-hk8-tq16384-s2048-d128-causal-varlen")
    spec = grouped.specialization
    alone = default_config(spec, H200)
    for heads in (1, 4):
        record = tuned(grouped, config=alone.replace(packed_heads=heads))
        ladder.user(record)
        for sizes, expected in (
            (PackedSizes(64, 32, 8, 512, 8, 2048), 4),
            (PackedSizes(64, 32, 32, 4096, 64, 64), 1),
            (PackedSizes(64, 28, 4, 16384, 2048, 2048), 1),
            (PackedSizes(4, 32, 8, 32768, 8192, 8192), 1),
        ):
            served = served_packed(spec, sizes, H200, ladder.records())
            assert (served.rung, served.record) == (5, record)
            assert served.config["packed_heads"] == expected
        exact = served_packed(spec, PackedSizes.of(grouped), H200, ladder.records())
        assert (exact.rung, exact.config) == (3, record.config), "what was measured stays"


def test_what_must_not_depend_on_the_batch_has_the_default(ladder: Ladder) -> None:
    ladder.user(tuned(stages=1))
    records = ladder.records()
    found = {
        served_packed(SPEC, SIZES._replace(batch=n, total_q=64 * n), H200, records, batch_invariant=True)
        for n in range(1, 40)
    }
    assert [(one.rung, one.config) for one in found] == [(8, default_config(SPEC, H200))]
    assert "do not depend on the batch" in next(iter(found)).skipped[0]


def test_explain_says_what_serves_and_how_fast_it_is_on_each_profile(ladder: Ladder) -> None:
    ladder.user(tuned())
    near = Workload.parse("fp32-b12-h32-hk8-tq20000-s6000-d128-causal-varlen")
    found = explain(near, near.specialization, H200, ladder.records())
    assert found.to_dict()["record_profile_ms"] == {"ramp": 955.0, "tail": 955.0, "close": 955.0}
    text = str(found)
    assert "rung       3. user database, exact" in text
    assert "955.0000 ms on ramp" in text
    given = config(1)
    assert explain(near, near.specialization, H200, ladder.records(), config=given).served.rung == 1


def call(
    batch: int, total: int, longest: int, *, trains: bool = False, dtype: torch.dtype = torch.float32, **options: object
) -> None:
    q, k = (torch.zeros(total, heads, 128, dtype=dtype).as_subclass(OnGpu) for heads in (32, 8))
    ends = torch.linspace(0, total, batch + 1).int().as_subclass(OnGpu)
    if trains:
        q.requires_grad_()
    out = flashgen.attention_varlen(q, k, k, ends, max_seqlen_q=longest, causal=True, **options)  # type: ignore[call-overload]
    if trains:
        out.sum().backward()


@EXHAUSTIVE
@pytest.mark.parametrize("trains", first(1, [True, False]))
def test_nothing_compiles_after_a_warm_up(gpu: FakeGpu, ladder: Ladder, trains: bool) -> None:
    """Two hundred random batches up to what was warmed, with records of several classes."""
    backward = replace(BATCH, direction="backward")
    twin = default_config(backward.specialization, H200)
    ladder.user(
        tuned(stages=1),
        tuned(Workload.parse("fp32-b4-h32-hk8-tq512-s256-d128-causal-varlen"), stages=3),
        tuned(Workload.parse("fp32-b4-h32-hk8-s1024-d128-causal"), stages=2),
        tuned(backward, config=twin.replace(heads_per_group=1)),
    )
    flashgen.warmup([Workload.parse("fp32-b32-h32-hk8-tq2048-s1024-d128-causal-varlen")], training=trains)
    ready, chance = set(gpu.compiled), random.Random(7)
    assert len({config for _, config in ready}) >= 3
    for _ in range(200 if not trains else 40):
        call(chance.randint(1, 32), chance.randint(1, 2048), chance.randint(1, 1024), trains=trains)
    assert set(gpu.compiled) == ready
    assert 1 < len(gpu.prepared) < 40 or trains, "the rest are open to their sizes"


@EXHAUSTIVE
def test_nothing_compiles_for_tiles_of_fewer_heads_after_a_warm_up(gpu: FakeGpu, ladder: Ladder) -> None:
    """Of a group of 4, as many heads a tile as the tokens and the sequences of a batch take."""
    large = Workload.parse("bwd-b32-h32-hk8-tq8192-s2048-d128-causal-varlen")
    row = default_config(large.specialization, H200)
    small = replace(large, batch=1, total_q=512, seqlen_q=512, seqlen_k=512)
    ladder.user(tuned(large, config=row.replace(heads_per_group=16)), tuned(small, config=row))
    flashgen.warmup([replace(large, direction="forward")], training=True)
    ready, served = set(gpu.compiled), set()
    for batch in (1, 4, 32):
        call(batch, 8192, 2048, trains=True, dtype=torch.bfloat16)
        sizes = PackedSizes.of(replace(large, batch=batch))
        served.add(served_packed(large.specialization, sizes, H200, ladder.records()).config)
    assert set(gpu.compiled) == ready
    assert {config["heads_per_group"] for config in served} == {16}
    assert len({config["heads_per_tile"] for config in served}) > 1


def test_a_deterministic_call_is_served_by_the_default_in_both_passes(gpu: FakeGpu, ladder: Ladder) -> None:
    backward = replace(BATCH, direction="backward", deterministic=True)
    row = default_config(backward.specialization, H200)
    ladder.user(tuned(stages=1), tuned(backward, config=row.replace(heads_per_group=1)))
    call(16, 2048, 512, trains=True, deterministic=True)
    assert {spec.direction: config for spec, config in gpu.compiled} == {
        "forward": default_config(SPEC, H200),
        "backward": row,
    }
    gpu.compiled.clear()
    call(16, 2048, 512, trains=True)
    assert usual(config(1), SPEC, SIZES.sizes, H200) in {config for _, config in gpu.compiled}
