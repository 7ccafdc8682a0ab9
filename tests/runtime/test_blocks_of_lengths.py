"""Lengths of as many blocks of rows: one config serves all of them, and it is chosen once."""

from __future__ import annotations

import pytest

from flashgen.codegen.family import Sizes
from flashgen.core.workload import Workload
from flashgen.runtime.lookup import by_sizes
from flashgen.runtime.lookup.by_sizes import SizesLookup
from tests.db.samples import H200
from tests.runtime.ladders import Ladder, config, faster, measured

CAUSAL = Workload.parse("b1-h16-s4096-d128-causal")
FULL = Workload.parse("b1-h16-s4096-d128")


def shape(rows: int, keys: int | None = None, workload: Workload = CAUSAL) -> Workload:
    return workload.with_shape(seqlen_q=rows, seqlen_k=rows if keys is None else keys)


def lookup_of(ladder: Ladder, workload: Workload = CAUSAL) -> SizesLookup:
    spec, records = workload.specialization, ladder.records()
    return SizesLookup(records.choices(spec, H200), workload, spec, H200, records)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """The sizes that records are compared with."""
    found, choose = list[Sizes](), SizesLookup._choose

    def counted(lookup: SizesLookup, sizes: Sizes) -> object:
        found.append(sizes)
        return choose(lookup, sizes)

    monkeypatch.setattr(SizesLookup, "_choose", counted)
    return found


def test_records_are_compared_once_for_all_lengths_of_as_many_blocks(ladder: Ladder, asked: list[Sizes]) -> None:
    ladder.user(measured(shape(1024), config=config(1)), measured(shape(4096), config=config(32)))
    lookup = lookup_of(ladder)
    for rows in (1985, 2000, 2047, 2048):
        assert lookup.config(Sizes.of(shape(rows)), generated_only=True) == ladder.resolve(shape(rows)).config
    assert asked == [Sizes.of(shape(2048))]
    for other in (shape(2049), shape(2048, 4096), shape(2048).with_shape(batch=2), shape(50), shape(51)):
        assert lookup.config(Sizes.of(other), generated_only=True) == ladder.resolve(other).config
    assert len(asked) == 6
    assert lookup.config(Sizes.of(shape(1024)), generated_only=True) is None, "a record of the very sizes serves"


def test_a_call_is_handed_over_by_its_very_sizes(ladder: Ladder) -> None:
    """Torch's causal attention is ours where there are as many queries as keys, and not merely as many blocks."""
    beaten = measured(shape(4096), config=config(8, "pointer"), baselines=faster("sdpa-flash", 0.2))
    ladder.user(beaten)
    lookup = lookup_of(ladder)
    for _ in range(2):
        assert lookup.config(Sizes.of(shape(4000)), generated_only=False) is None
        assert lookup.config(Sizes.of(shape(4000)), generated_only=True) == beaten.config
        assert lookup.config(Sizes.of(shape(4000, 4001)), generated_only=False) == beaten.config


def test_choices_are_not_kept_without_end(ladder: Ladder, asked: list[Sizes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_sizes, "MOST_CHOICES", 2)
    ladder.user(measured(FULL))
    lookup = lookup_of(ladder, FULL)
    for rows in (1024, 2048, 8192, 8192, 1024):
        assert lookup.config(Sizes.of(shape(rows, workload=FULL)), generated_only=True) is not None
        assert len(lookup._chosen) <= 2
    assert [each.seqlen_q for each in asked] == [1024, 2048, 8192, 1024]


def test_of_records_that_are_as_far_the_users_serves(ladder: Ladder) -> None:
    ladder.ship(measured(shape(2000), config=config(1)))
    assert ladder.resolve(shape(2048)).config == config(1)
    ladder.user(measured(shape(2020), config=config(32)))
    assert ladder.resolve(shape(2048)).config == config(32)
    assert lookup_of(ladder).config(Sizes.of(shape(2040)), generated_only=True) == config(32)
