"""Lists that are learned: as few configs as leave no workload behind, and nothing that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.config import Config
from flashgen.core.workload import Workload
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.learned_seeds import LEAST_WORKLOADS, MOST, Row, chosen, is_near, learn
from flashgen.tuning.regrets import Known
from flashgen.tuning.seed_lists import GENERATED, HAND
from tests.tuning.fakes import H200

SPEC = Workload.parse("b4-h16-s4096-d128").specialization
DEFAULT = default_config(SPEC, H200)
HAND_WRITTEN = Row.of(Known(workload=Workload.parse("b4-h16-s4096-d128"), served=None, winner=None, ratios={}), H200)
assert HAND_WRITTEN is not None
OTHERS = [
    config
    for space in Candidates.of(Workload.parse("b4-h16-s4096-d128"), H200, ("hopper_forward",)).spaces
    for config in space.configs
    if config not in (DEFAULT, *HAND_WRITTEN.hand)
][:20]


def known(seqlen: int, ratios: Mapping[Config, float], winner: Config | None = None) -> Known:
    workload = Workload.parse(f"b4-h16-s{seqlen}-d128")
    return Known(workload=workload, served=winner, winner=winner, ratios=ratios)


def rows(each: Sequence[Known]) -> list[Row]:
    return [row for row in (Row.of(one, H200) for one in each) if row is not None]


def test_one_config_that_is_near_everywhere_is_enough() -> None:
    best, near = OTHERS[:3], OTHERS[3]
    worlds = [known(512 * (n + 1), {DEFAULT: 1.2, best[n]: 1.0, near: 1.029}, best[n]) for n in range(3)]
    assert chosen(rows(worlds)) == (near,)
    worlds[0] = known(512, {DEFAULT: 1.2, best[0]: 1.0, near: 1.031}, best[0])
    assert set(chosen(rows(worlds))) == {near, best[0]}
    assert chosen(rows(worlds)) == chosen(rows(worlds[::-1]))


def test_the_default_needs_no_list() -> None:
    assert chosen(rows([known(512, {DEFAULT: 1.02, OTHERS[0]: 1.0}, OTHERS[0])])) == ()
    assert chosen(rows([known(512, {}, DEFAULT)])) == ()


def test_what_nobody_timed_is_not_assumed() -> None:
    """A winner elsewhere that is unknown here leaves the workload to its own winner."""
    worlds = [known(512 * (n + 1), {}, OTHERS[n]) for n in range(3)]
    assert set(chosen(rows(worlds))) == set(OTHERS[:3])
    row = rows(worlds)[0]
    assert (row.least([OTHERS[1]]), row.least([OTHERS[0]])) == (None, 1.0)


def test_a_list_is_short_and_those_that_help_most_come_first() -> None:
    worlds = [known(512 * (n + 1), {}, OTHERS[n % 12]) for n in range(14)]
    found = chosen(rows(worlds))
    assert len(found) == MOST
    assert set(found[:2]) == set(OTHERS[:2]), "which won twice"


def test_a_config_that_failed_serves_nothing() -> None:
    broken = known(512, {DEFAULT: 1.5, OTHERS[0]: float("inf"), OTHERS[1]: 1.0}, OTHERS[1])
    assert chosen(rows([broken])) == (OTHERS[1],)
    assert not is_near(rows([broken])[0].least([OTHERS[0]]))


def test_hand_written_lists_stay_where_they_are_better_for_workloads_that_are_left_out() -> None:
    by_hand = HAND_WRITTEN.hand[-1] if HAND_WRITTEN else DEFAULT
    unlike = [known(512 * (n + 1), {by_hand: 1.02}, OTHERS[n]) for n in range(LEAST_WORKLOADS)]
    (learned,) = learn(unlike, H200)
    assert (learned.name, learned.serves) == ("fwd-16bit-d128-full", GENERATED), "the hand-written one was found"
    unlike = [known(512 * (n + 1), {HAND_WRITTEN.hand[n]: 1.0}, None) for n in range(LEAST_WORKLOADS)]  # type: ignore[union-attr]
    (learned,) = learn(unlike, H200)
    assert learned.serves == HAND
    assert "0 of 4 workloads, the hand-written ones for 4" in learned.why
    assert all(each.generated == each.hand == 1.0 and each.left_out is None for each in learned.judged)
    same = [known(512 * (n + 1), {}, OTHERS[0]) for n in range(LEAST_WORKLOADS)]
    (learned,) = learn(same, H200)
    assert learned.serves == GENERATED
    assert [each.left_out for each in learned.judged] == [1.0] * LEAST_WORKLOADS


@pytest.mark.parametrize("count", [1, LEAST_WORKLOADS - 1])
def test_few_workloads_leave_a_class_to_the_lists_that_are_better_than_the_default(count: int) -> None:
    by_hand = HAND_WRITTEN.hand[-1] if HAND_WRITTEN else DEFAULT
    (learned,) = learn([known(512 * (n + 1), {}, by_hand) for n in range(count)], H200)
    assert (learned.serves, "too few" in learned.why) == (HAND, True)
    (learned,) = learn([known(512 * (n + 1), {}, OTHERS[0]) for n in range(count)], H200)
    assert learned.serves == GENERATED, "nothing is lost"


def test_a_workload_that_no_family_serves_is_left_out() -> None:
    odd = Known(workload=Workload.parse("fp32-b4-h16-s64-d4000"), served=None, winner=None, ratios={})
    assert learn([odd], H200) == []
