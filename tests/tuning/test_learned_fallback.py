"""Rules that are learned: a tree where it is better on workloads that were left out, else the nearest record."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from flashgen.codegen.families import balanced
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.workload import Workload
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.rules import NEAREST, TREE, Split, leaves
from flashgen.tuning import learned_fallback
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.learned_fallback import FREQUENT, Case, chance, estimated, frequent, learn, nearest
from flashgen.tuning.learned_files import Learned, rules_text
from flashgen.tuning.regrets import Known
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200

SPACE = Candidates.of(Workload.parse("b4-h16-s4096-d128"), H200, ("hopper_forward",)).spaces[0].configs
SHORT, LONG, ODD = (
    SPACE[0],
    next(config for config in SPACE if len(set(config.knobs) - set(SPACE[0].knobs)) > 4),
    SPACE[-1],
)


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has the config of a record serve all sizes as it is, whatever tile suits them."""
    monkeypatch.setattr(learned_fallback, "balanced", lambda config, *_: config)


def known(seqlen: int, winner: Config, ratios: dict[Config, float] | None = None, batch: int = 4) -> Known:
    workload = Workload.parse(f"b{batch}-h16-s{seqlen}-d128")
    return Known(workload=workload, served=winner, winner=winner, ratios=ratios or {})


def two_regimes(timed: bool = True) -> list[Known]:
    """Short sequences want one config and long ones another, but for a few in between that noise decided."""
    found = []
    for number in range(20):
        seqlen = 256 * (number + 1) if number < 10 else 256 * (number + 11)
        right, wrong = (SHORT, LONG) if number < 10 else (LONG, SHORT)
        odd = number % 4 == 2
        ratios = {right: 1.01 if odd else 1.0, wrong: 1.1, ODD: 1.0 if odd else 1.12}
        found.append(known(seqlen, ODD if odd else right, ratios if timed else None))
    return found


@pytest.mark.usefixtures("as_recorded")
def test_a_tree_finds_two_regimes_and_is_not_fooled_by_winners_by_chance() -> None:
    (learned,) = learn(two_regimes(), H200)
    assert learned.serves == TREE
    tree = learned.rule.tree
    assert isinstance(tree, Split)
    assert 2560 <= tree.most // (16 * 4 if tree.question == "rows" else 1) < 5376
    assert [leaf.config for leaf in leaves(tree)] == [SHORT, LONG]
    assert learned.outcomes[TREE].worst == pytest.approx(1.01)
    assert learned.outcomes[NEAREST].worst > 1.09
    assert learned.outcomes[FREQUENT].mean > learned.outcomes[TREE].mean
    assert all(leaf.expected.worst == pytest.approx(1.01) and leaf.expected.workloads == 10 for leaf in leaves(tree))
    assert sum(learned.timed) == 11  # at nine lengths the default has another tile, which nobody timed


def test_without_any_times_nothing_takes_the_nearest_record_s_place() -> None:
    (learned,) = learn(two_regimes(timed=False), H200)
    assert (learned.serves, "0 of 20 workloads are timed" in learned.rule.why) == (NEAREST, True)
    assert learned.rule.nearest is not None
    assert learned.rule.nearest.timed == 0


def test_few_workloads_are_left_to_the_nearest_record() -> None:
    (learned,) = learn(two_regimes()[:5], H200)
    assert (learned.serves, learned.rule.tree) == (NEAREST, None)
    assert "5 workloads are too few" in learned.rule.why
    assert learn(two_regimes()[:1], H200) == []


@pytest.mark.usefixtures("as_recorded")
def test_a_tree_that_is_no_better_does_not_serve() -> None:
    (learned,) = learn([known(256 * n, SHORT, {SHORT: 1.0, LONG: 1.1}) for n in range(1, 9)], H200)
    assert (learned.serves, learned.outcomes[TREE].mean, learned.outcomes[NEAREST].mean) == (NEAREST, 1.0, 1.0)


@pytest.mark.usefixtures("as_recorded")
def test_a_tree_that_is_worse_on_a_timed_workload_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each condition holds by itself: chance, the mean, the worst case, and what was timed."""
    regimes = two_regimes()
    assert learn(regimes, H200)[0].serves == TREE
    spoilt = [*regimes[:-1], known(7680, SHORT, {SHORT: 1.0, LONG: 1.08, ODD: 1.3})]
    spoilt += [known(7680, SHORT, {SHORT: 1.0, LONG: 1.08, ODD: 1.3}, batch=5)]
    assert learn(spoilt, H200)[0].serves == NEAREST
    monkeypatch.setattr(learned_fallback, "SURE", 0.0)
    assert learn(regimes, H200)[0].serves == NEAREST


def test_chance_is_the_sign_test_s() -> None:
    assert (chance(0, 0), chance(1, 0), chance(4, 0)) == (1.0, 0.5, 0.0625)
    assert chance(6, 2) == pytest.approx(37 / 256)


def test_what_nobody_timed_is_estimated_by_the_knobs_that_differ() -> None:
    assert estimated(SHORT, SHORT) == 0
    one = SHORT.replace(heads_per_group=2)
    assert 0 < estimated(one, SHORT) < estimated(LONG, SHORT) < estimated(portable(), SHORT)


def portable() -> Config:
    return Candidates.of(Workload.parse("b4-h16-s4096-d128"), H200, ("portable_forward",)).default


def cases(each: Iterable[Known]) -> list[Case]:
    return [Case.of(one, H200) for one in each]


@pytest.mark.usefixtures("as_recorded")
def test_the_nearest_and_the_most_frequent_are_what_can_serve_else_the_default() -> None:
    here, *others = cases([known(1024, SHORT), known(1100, ODD), known(4096, LONG), known(8192, LONG)])
    assert (nearest(here, others), frequent(here, others)) == (ODD, LONG)
    assert nearest(here, []) == frequent(here, []) == here.default
    packed = Workload.parse("b4-h16-hk4-sq4-sk4096-d128-causal")
    few = Case.of(Known(workload=packed, served=None, winner=None, ratios={}), H200)
    assert nearest(few, others) == few.default, "whose heads are packed, as those of the others are not"


def test_a_record_is_judged_by_the_tile_that_it_serves_with() -> None:
    """At 300 rows tiles of 192 fit worse than what the ladder takes in their place."""
    here, there = Workload.parse("b2-h4-s300-d128"), Workload.parse("b2-h4-s4096-d128")
    spec, sizes = specialization(here), Sizes.of(here)
    recorded = next(config for config in SPACE if balanced(config, spec, sizes, H200) != config)
    served = balanced(recorded, spec, sizes, H200)
    assert served in SPACE
    one = Known(workload=here, served=served, winner=served, ratios={served: 1.0, recorded: 1.5})
    other = Known(workload=there, served=recorded, winner=recorded, ratios={recorded: 1.0, served: 1.2})
    short, long = cases([one, other])
    assert nearest(short, [long]) == frequent(short, [long]) == served
    assert (short.loss_by(recorded), short.loss(recorded)) == (0.0, pytest.approx(math.log(1.5)))
    (learned,) = learn([one, other], H200)
    assert learned.outcomes[NEAREST].ratios[learned.workloads.index(here.key)] == 1.0
    assert learned.rule.nearest is not None


def test_steps_of_decoding_and_packed_sequences_are_left_alone() -> None:
    keys = ("dec-b4-h16-sk4096-d128", "b4-h16-s4096-d128-varlen")
    every = [Known(workload=Workload.parse(key), served=None, winner=None, ratios={}) for key in (*keys, *keys)]
    assert learn(every, H200) == []


@EXHAUSTIVE
def test_the_same_is_learned_every_time() -> None:
    origin = Learned(device=H200, records=20, tables=())
    assert rules_text(learn(two_regimes(), H200), origin) == rules_text(learn(two_regimes(), H200), origin)
