"""What serves packed sequences over pages: records with such pages, with others, and without; and the default."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.codegen import families
from flashgen.codegen.families import default_config
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.core.config import Config
from flashgen.core.record import SPLIT, Baseline, TuningRecord
from flashgen.core.workload import Workload
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.mixed import Launches, launches
from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_packed
from tests.db.samples import H100, H200
from tests.fakes.gpu import FakeGpu, OnGpu
from tests.families import use_families
from tests.runtime.ladders import Ladder
from tests.runtime.packed_records import tuned
from tests.tiers import first

PAGED = Workload.parse("b8-h32-hk8-tq8192-sq2048-sk16384-d128-causal-varlen-page16")
SIZES = PackedSizes.of(PAGED)


FAMILIES = families.FAMILIES


@pytest.fixture(autouse=True)
def _one_family_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable kernels read pages of any size: with these alone configs of one family stand for all pages."""
    without = replace(HOPPER_FORWARD, features=HOPPER_FORWARD.features - {"pages"})
    use_families(monkeypatch, [without if row.id == without.id else row for row in FAMILIES])


def with_pages(page_size: int | None, workload: Workload = PAGED) -> Workload:
    return replace(workload, page_size=page_size)


def config(number: int) -> Config:
    """One that reads pages of any size, and that is told from the default and from others by its order of programs."""
    orders = ((8, False), (1, True), (32, True), (0, True), (1, False), (32, False))
    heads_per_group, heavy_first = orders[number]
    portable = default_config(PAGED.specialization, H200, ["portable_forward"])
    return portable.replace(heads_per_group=heads_per_group, heavy_first=heavy_first)


def plain(number: int) -> Config:
    """One of the family that reads pages, as it is tuned without them."""
    return config(number).replace(page_ids="load")


def test_a_record_of_the_class_serves_pages_of_about_its_size(ladder: Ladder) -> None:
    ladder.user(tuned(PAGED, config=config(1)))
    records = ladder.records()
    for page_size, rung in ((16, 3), (24, 3), (31, 3), (15, 5), (32, 5)):
        served = served_packed(with_pages(page_size).specialization, SIZES, H200, records)
        assert (served.rung, served.config) == (rung, config(1)), page_size
    assert served_packed(with_pages(None).specialization, SIZES, H200, records).rung == 8, "without pages it does not"


def test_pages_of_another_class_come_before_none_and_after_their_own(ladder: Ladder) -> None:
    spec = PAGED.specialization
    assert served_packed(spec, SIZES, H200, ladder.records()).rung == 8
    ladder.ship(tuned(with_pages(None), config=plain(1)))
    served = served_packed(spec, SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (5, config(1)), "with ids read as over pages"
    ladder.ship(tuned(with_pages(128), config=config(4)))
    assert served_packed(spec, SIZES, H200, ladder.records()).config == config(4)
    ladder.ship(tuned(with_pages(64), config=config(3)))
    assert served_packed(spec, SIZES, H200, ladder.records()).config == config(3), "the nearest size"
    ladder.ship(tuned(PAGED.with_shape(total_q=16384), config=config(2)))
    assert served_packed(spec, SIZES, H200, ladder.records()).config == config(2)


def test_a_record_without_pages_comes_before_those_with_pages_that_are_far(ladder: Ladder) -> None:
    far = Workload.parse("b8-h32-hk8-tq64-s64-d128-causal-varlen-page16")
    ladder.user(tuned(far, config=config(3)))
    assert served_packed(PAGED.specialization, SIZES, H200, ladder.records()).config == config(3)
    ladder.user(tuned(with_pages(None), config=plain(1)))
    assert served_packed(PAGED.specialization, SIZES, H200, ladder.records()).config == config(1)


def test_configs_that_cannot_read_the_pages_leave_the_call_to_the_next(ladder: Ladder) -> None:
    """TMA loads whole tiles of a page of 64 keys, and here the Hopper family none."""
    by_tma = default_config(with_pages(64).specialization, H200)
    assert by_tma["loads"] == "descriptor"
    hopper = default_config(with_pages(None).specialization, H200)
    assert hopper.family == "hopper_forward"
    ladder.ship(tuned(with_pages(64), config=by_tma), tuned(with_pages(None), config=hopper))
    served = served_packed(PAGED.specialization, SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (8, default_config(PAGED.specialization, H200))
    wider = served_packed(with_pages(128).specialization, SIZES, H200, ladder.records())
    assert (wider.rung, wider.config) == (5, by_tma), "a page of 128 keys holds them"


def test_dense_records_do_not_serve_pages(ladder: Ladder) -> None:
    ladder.user(tuned(Workload.parse("b4-h32-hk8-sq2048-sk16384-d128-causal"), config=plain(1)))
    assert served_packed(PAGED.specialization, SIZES, H200, ladder.records()).rung == 8


def test_another_device_of_the_architecture_is_below_this_one(ladder: Ladder) -> None:
    ladder.ship(tuned(PAGED, config=config(1), device=H100), tuned(with_pages(64), config=config(3), device=H100))
    served = served_packed(PAGED.specialization, SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (6, config(1))
    ladder.ship(tuned(with_pages(None), config=plain(2)))
    assert served_packed(PAGED.specialization, SIZES, H200, ladder.records()).rung == 5


def test_explain_names_the_record_and_says_why_its_config_is_another(ladder: Ladder) -> None:
    ladder.user(tuned(with_pages(None), config=plain(1)))
    text = str(explain(PAGED, PAGED.specialization, H200, ladder.records()))
    assert f"record     {with_pages(None).key} in " in text
    assert "measured without pages, over which the config above serves" in text
    ladder.user(tuned(with_pages(64), config=config(3)))
    text = str(explain(PAGED, PAGED.specialization, H200, ladder.records()))
    assert f"record     {with_pages(64).key} in " in text
    assert "measured without" not in text


def call(batch: int, total: int, longest: int, pages: int, page_size: int) -> None:
    q, cache = (torch.zeros(*shape, 128, dtype=torch.bfloat16) for shape in ((total, 32), (4, page_size, 8)))
    ends, lens = torch.linspace(0, total, batch + 1).int(), torch.zeros(batch, dtype=torch.int32)
    table = torch.zeros(batch, pages, dtype=torch.int32)
    one, kv, cu, used, where = (each.as_subclass(OnGpu) for each in (q, cache, ends, lens, table))
    flashgen.attention_varlen(one, kv, kv, cu, block_table=where, seqused_k=used, max_seqlen_q=longest, causal=True)


@pytest.mark.parametrize("page_size", first(1, [16, 64]))
def test_nothing_compiles_after_a_warm_up(gpu: FakeGpu, ladder: Ladder, page_size: int) -> None:
    """Random batches over pages up to what was warmed, tables with little room among them, by records of all kinds."""
    ladder.user(
        tuned(PAGED, config=config(1)),
        tuned(Workload.parse("b8-h32-hk8-tq512-s256-d128-causal-varlen-page16"), config=config(3)),
        tuned(Workload.parse("b8-h32-hk8-tq512-s256-d128-causal-varlen-page64"), config=config(4)),
        tuned(Workload.parse("b4-h32-hk8-s1024-d128-causal-varlen"), config=plain(5)),
    )
    most = Workload.parse(f"b16-h32-hk8-tq2048-sq1024-sk4096-d128-causal-varlen-page{page_size}")
    flashgen.warmup([most])
    ready, chance = set(gpu.compiled), random.Random(7)
    assert len({config for _, config in ready}) >= 3
    for _ in range(100):
        pages = chance.randint(1, 4096 // page_size)
        call(chance.randint(1, 16), chance.randint(1, 2048), chance.randint(1, 1024), pages, page_size)
    assert set(gpu.compiled) == ready


MIXED = Workload.parse("b16-h32-hk8-tq2060-sq2048-tk65536-sk8192-d128-causal-varlen-page16-mixed")


def beside(split_ms: float, workload: Workload = MIXED, **changes: object) -> TuningRecord:
    """A record of 905 ms in one launch, timed beside two."""
    return tuned(workload, **{"config": config(1), "baselines": (Baseline(impl=SPLIT, median_ms=split_ms),), **changes})


def two(ladder: Ladder, workload: Workload = MIXED, **options: bool) -> Launches:
    return launches(workload, workload.specialization, H200, ladder.records(), **options)


def test_a_record_says_whether_a_mixed_batch_is_split(ladder: Ladder) -> None:
    few = replace(MIXED, seqlen_k=500, total_k=4000, lengths="")
    assert (two(ladder).are_two, two(ladder, few).are_two) == (True, False), "by the rule"
    ladder.ship(beside(1000.0), beside(800.0, replace(few, lengths="mixed")))
    assert (two(ladder).are_two, two(ladder, few).are_two) == (False, True), "the other way round"
    assert two(ladder, replace(MIXED, batch=13, total_q=3000, lengths="")).record == beside(1000.0), "its class"
    assert two(ladder, replace(MIXED, total_q=5000)).record is None, "another class has the rule"
    assert two(ladder, replace(MIXED, page_size=64)).record is None
    assert two(ladder, has_chunks=False).are_two, "steps of decoding alone are what a decode family is for"
    ladder.user(beside(700.0))
    assert two(ladder).are_two, "that of the user comes first"


def test_tiles_with_all_heads_of_a_group_make_it_one_launch(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    use_families(monkeypatch, FAMILIES)
    many = replace(MIXED, batch=64)
    assert "all heads that share keys" in two(ladder, many).why
    assert not two(ladder, many).are_two
    assert two(ladder, many, has_chunks=False).are_two, "steps of decoding alone"
    for other in (
        replace(many, batch=16),  # fewer tiles than SMs
        replace(many, seqlen_k=8193, total_k=131072),
        replace(many, nheads=28, nheads_k=4),  # in no packs
        replace(many, nheads=128, nheads_k=8),  # half of a group in a tile
        replace(many, nheads_k=32),
        replace(many, total_q=64 * 1024 + 1, seqlen_q=4096, seqlen_k=4096),  # long prompts
    ):
        assert two(ladder, other).are_two, other.key


def test_no_record_splits_what_no_decode_family_computes(ladder: Ladder) -> None:
    full = replace(MIXED, dtype="fp32")
    ladder.user(beside(1.0, full, config=default_config(full.specialization, H200)))
    assert not two(ladder, full).are_two
    assert "portable_decode" in two(ladder, full).why


def test_a_record_without_that_time_leaves_it_to_the_rule(ladder: Ladder) -> None:
    ladder.user(tuned(MIXED, config=config(1)), beside(1000.0, replace(MIXED, lengths="ramp")))
    assert two(ladder).record is None
    assert "512 or more, and nothing was measured" in str(explain(MIXED, MIXED.specialization, H200, ladder.records()))


def test_explain_says_what_was_measured(ladder: Ladder) -> None:
    ladder.user(beside(1000.0))
    found = explain(MIXED, MIXED.specialization, H200, ladder.records())
    why = f"one launch: 1000.0000 ms in two launches and 905.0000 ms in one were measured for {MIXED.key}"
    assert f"mixed      {why}" in str(found)
    assert found.to_dict()["mixed"] == why
    assert explain(PAGED, PAGED.specialization, H200, ladder.records()).mixed == ""


def test_the_hopper_family_reads_the_pages_that_tma_can_fill_its_steps_from(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records without pages serve these, with smaller steps where pages ask for it; others the portable one."""
    use_families(monkeypatch, FAMILIES)
    default = default_config(with_pages(None).specialization, H200)
    assert default.family == "hopper_forward"
    ladder.ship(tuned(with_pages(None), config=default.replace(v_stages=2, heads_per_group=8)))
    for page_size, rung, family, block_n in (
        (8, 5, "hopper_forward", 128),
        (16, 5, "hopper_forward", 128),
        (128, 5, "hopper_forward", 128),
        (192, 5, "hopper_forward", 64),
        (24, 8, "portable_forward", 128),
    ):
        served = served_packed(with_pages(page_size).specialization, SIZES, H200, ladder.records())
        assert (served.rung, served.config.family, served.config["block_n"]) == (rung, family, block_n), page_size
    ladder.ship(tuned(with_pages(64), config=config(1)))
    served = served_packed(with_pages(16).specialization, SIZES, H200, ladder.records())
    assert (served.rung, served.config) == (5, config(1)), "measured over pages, if of another size"
