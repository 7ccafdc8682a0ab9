"""Launches of decode configs with programs for each split of each sequence."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families import family, invalid
from flashgen.codegen.portable_decode.defaults import ONLY_SHARES
from flashgen.core.config import Config, KnobValue
from flashgen.runtime.decode import runs
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from tests.decoding import Case, decode_config, make
from tests.fakes.driver import FakeDriver, Launched
from tests.fakes.gpu_zero import H200

SMALL: dict[str, KnobValue] = {"block_n": 64, "num_warps": 4, "num_stages": 3, "per_sm": 1}


def config_of(call: DecodeCall, **knobs: KnobValue) -> Config:
    checked = CheckedDecode.of(call, call.q)
    found = decode_config(checked.spec, checked.shape.sizes, H200)
    found = found.replace(**{"schedule": "grid", **ONLY_SHARES, **SMALL, **knobs})
    assert invalid(found, checked.spec, H200) is None
    return found


def launched(fake: FakeDriver, call: DecodeCall, **knobs: KnobValue) -> list[Launched]:
    config, spec = config_of(call, **knobs), CheckedDecode.of(call, call.q).spec
    fake.named = {kernel.entry: kernel.parameters for kernel in family(config.family).kernels(spec, config)}
    before = len(fake.launches)
    runs.run(call, config)
    return fake.launches[before:]


def test_where_no_sequence_is_split_there_is_one_launch(driver: FakeDriver) -> None:
    call = make(Case(lens=(300, 0, 64) * 17, page=16, nheads=32, nheads_k=8, head_dim=16))
    (only,) = launched(driver, call)
    assert only.grid == (8, 51, 1)
    assert only.attributes == []
    assert (only.values["least_splits"], only.values["most_splits"], only.values["slots"]) == (1, 1, 1)


def test_few_sequences_are_split_by_a_grid_and_merged(driver: FakeDriver) -> None:
    call = make(Case(lens=(1000, 3), page=16, nheads=8, nheads_k=2, head_dim=16, seqlen_q=5, options={"causal": True}))
    first, second = launched(driver, call, block_m=16)
    assert first.grid == (2 * 2, 2, 16)  # key heads and blocks of 16 of 20 rows, sequences, tiles of 1024 slots
    assert second.grid == (16, 2 * 2, 2)
    for name in ("Lens", "PartO", "PartLse", "slots", "least_splits", "most_splits", "tile_rows", "seqlen_k"):
        assert first.values[name] == second.values[name]
    assert (first.attributes, second.attributes) == ([], [(6, 1)])


def test_the_first_kernel_may_be_scheduled_early(driver: FakeDriver) -> None:
    call = make(Case(lens=(200, 3), nheads=2, nheads_k=1, head_dim=16))
    first, second = launched(driver, call, early=True, pdl=False)
    assert (first.attributes, second.attributes) == ([(6, 1)], [])


def test_fixed_splits_and_long_sequences_have_programs_of_their_own(driver: FakeDriver) -> None:
    call = make(Case(lens=(2048, 3), nheads=1, nheads_k=1, head_dim=16))
    first, second = launched(driver, replace(call, fixed_split_size=256))
    assert (first.grid, second.grid) == ((1, 2, 8), (1, 1, 2))
    assert (first.values["split_tiles"], first.values["slots"]) == (4, 8)
    many = make(Case(lens=(2048, 3) * 70, nheads=2, nheads_k=2, head_dim=16))
    first, second = launched(driver, many, chunk=1024)
    assert (first.grid, second.grid) == ((2, 140, 2), (1, 2, 140))
    assert (first.values["least_splits"], first.values["most_splits"]) == (1, 2)
