"""The search: better than random, never twice the same, equal after a resume, and fed with failures as data."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from flashgen.codegen.families import FAMILIES, default_config
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure, Measurement, Trial
from flashgen.core.workload import Specialization, Workload
from flashgen.tuning import search as module
from flashgen.tuning.lattice import FamilySpace, Lattice
from flashgen.tuning.search import Proposal, Search
from tests.tiers import EXHAUSTIVE, first
from tests.tuning.spaces import outcome, space, time_ms

SPACE = space()
WORKLOAD = Workload(batch=1, nheads=8, seqlen_q=1024, head_dim=64)
H100 = find_device("h100")


def run(search: Search, points: int, surface: int = 0) -> list[Trial]:
    trials = []
    for _ in range(points):
        proposal = search.ask()
        if proposal is None:
            break
        result = outcome(proposal.config, surface)
        search.tell(proposal.config, result)
        trials.append(
            Trial(workload=WORKLOAD, device=H100, config=proposal.config, source=proposal.source, outcome=result)
        )
    return trials


def best_ms(configs: list[Config], surface: int) -> float:
    results = [outcome(config, surface) for config in configs]
    return min(result.median_ms for result in results if isinstance(result, Measurement))


def small(count: int) -> FamilySpace:
    return FamilySpace(family="rugged", knobs=SPACE.knobs, configs=SPACE.configs[:count])


@EXHAUSTIVE
def test_it_beats_random_search_by_a_margin() -> None:
    """Mean best/optimum over surfaces and seeds: after 80 points at least 0.05 nearer to the optimum."""
    found, drawn = [], []
    for surface in range(3):
        optimum = best_ms(list(SPACE.configs), surface)
        for seed in range(3):
            trials = run(Search([SPACE], seed=seed), 80, surface)
            found.append(optimum / best_ms([trial.config for trial in trials], surface))
            drawn.append(optimum / best_ms(random.Random(seed).sample(SPACE.configs, 80), surface))
    assert statistics.mean(found) > statistics.mean(drawn) + 0.05, (found, drawn)
    assert statistics.mean(found) > 0.92


def test_no_point_twice_and_every_point_once() -> None:
    search = Search([small(150)], seed=3)
    configs = [trial.config for trial in run(search, 1000)]
    assert len(configs) == len(set(configs)) == 150
    assert set(configs) == set(small(150).configs)
    assert search.ask() is None
    assert search.remaining == 0


def test_a_seed_fixes_the_sequence_and_another_changes_it() -> None:
    one, same, other = (run(Search([SPACE], seed=seed, name="x"), 40) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("stopped_after", first(1, [9, 1, 26]))
def test_a_resumed_search_goes_on_as_the_stopped_one_would_have(stopped_after: int) -> None:
    first = [(SPACE.configs[70], "default"), (SPACE.configs[7], "neighbour")]
    whole = run(Search([SPACE], first=first, seed=5), 45)
    again = run(Search([SPACE], first=first, seed=5, trials=whole[:stopped_after]), 45 - stopped_after)
    assert whole[stopped_after:] == again


def test_default_and_neighbours_come_first_and_unknown_ones_are_left_out() -> None:
    default, neighbour = SPACE.configs[100], SPACE.configs[200]
    foreign = default.replace(block_m=12345)
    first = [(default, "default"), (foreign, "neighbour"), (neighbour, "neighbour"), (default, "neighbour")]
    trials = run(Search([SPACE], first=first, seed=0), 30)
    assert [(t.config, t.source) for t in trials[:2]] == [(default, "default"), (neighbour, "neighbour")]
    assert {t.source for t in trials[2:]} == {"random", "local", "sampler"}


def test_local_points_are_neighbours_of_a_good_config() -> None:
    lattice = Lattice(SPACE)
    trials = run(Search([SPACE], seed=0), 40)
    for position, trial in enumerate(trials):
        if trial.source == "local":
            good = [t for t in trials[:position] if isinstance(t.outcome, Measurement)]
            top = sorted(good, key=lambda t: time_ms(t.config))[: module.LOCAL_POOL]
            assert trial.config in {near for t in top for near in lattice.neighbours(t.config)}


def test_ask_may_run_ahead_of_tell() -> None:
    search = Search([SPACE], seed=0)
    waiting: list[Proposal] = []
    told = 0
    for _ in range(60):
        proposal = search.ask()
        assert proposal is not None
        waiting.append(proposal)
        if len(waiting) == 6:
            config = waiting.pop(0).config
            search.tell(config, outcome(config))
            told += 1
    assert told == 55
    assert len({p.config for p in waiting}) == 5


def test_failures_teach_the_sampler() -> None:
    """Where every descriptor config fails, the sampler soon leaves them (half of all points are such)."""
    search = Search([SPACE], seed=0)
    sampled = []
    for _ in range(70):
        proposal = search.ask()
        assert proposal is not None
        bad = proposal.config["loads"] == "descriptor"
        result = (
            Failure(stage="timeout", reason="planted") if bad else Measurement(times_ms=(time_ms(proposal.config),))
        )
        search.tell(proposal.config, result)
        sampled += [bad] if proposal.source == "sampler" else []
    assert len(sampled) >= 25
    assert statistics.mean(sampled[10:]) < 0.2


@EXHAUSTIVE
def test_families_share_the_budget_and_the_better_one_gets_more() -> None:
    search = Search([space("fast"), space("slow")], seed=0)
    asked = {"fast": 0, "slow": 0}
    for _ in range(80):
        proposal = search.ask()
        assert proposal is not None
        family = proposal.config.family
        asked[family] += 1
        factor = 1.0 if family == "fast" else 3.0
        search.tell(proposal.config, Measurement(times_ms=(factor * time_ms(proposal.config),)))
    assert asked["slow"] == pytest.approx(module.BEHIND_AFTER + 80 / module.BEHIND_EVERY, abs=2)


def test_families_that_are_close_both_have_their_share() -> None:
    both = [space("fast"), space("slow")]
    search = Search(both, first=[(min(each.configs, key=time_ms), "default") for each in both], seed=0)
    asked = {"fast": 0, "slow": 0}
    for _ in range(80):
        proposal = search.ask()
        assert proposal is not None
        asked[proposal.config.family] += 1
        factor = 1.0 if proposal.config.family == "fast" else 1.02
        search.tell(proposal.config, Measurement(times_ms=(factor * time_ms(proposal.config),)))
    assert min(asked.values()) >= 80 / 3 - 1


def test_first_configs_of_a_family_that_is_behind_wait() -> None:
    fast, slow = space("fast"), space("slow")
    first = [(config, "model") for config in (*slow.configs[:12], *fast.configs[:6])]
    sources: dict[str, list[str]] = {"fast": [], "slow": []}
    search = Search([fast, slow], first=[(fast.configs[-1], "default"), *first], seed=0)
    for _ in range(7 + module.BEHIND_AFTER):
        proposal = search.ask()
        assert proposal is not None
        sources[proposal.config.family].append(proposal.source)
        factor = 1.0 if proposal.config.family == "fast" else 30.0
        search.tell(proposal.config, Measurement(times_ms=(factor * time_ms(proposal.config),)))
    assert sources == {"fast": ["default", *["model"] * 6], "slow": ["model"] * module.BEHIND_AFTER}


class Knowing:
    """A model that takes one family to be the best, and in it what the times say."""

    def __init__(self, family: str) -> None:
        self.family = family

    def expected(self, configs: Sequence[Config], told: object) -> list[float]:
        return [math.log(time_ms(config)) + (config.family != self.family) for config in configs]


def thinned(family: str) -> FamilySpace:
    whole = space(family)
    return FamilySpace(family=family, knobs=whole.knobs, configs=whole.configs[::10])


def asked_ahead(search: Search, points: int, slow: float) -> list[Proposal]:
    """What is asked for where 17 candidates are compiled ahead; `slow` is how many times as long one family takes."""
    found: list[Proposal] = []
    for _ in range(points):
        proposal = search.ask()
        assert proposal is not None
        found.append(proposal)
        if len(found) >= 17:
            config = found[len(found) - 17].config
            factor = slow if config.family == "slow" else 1.0
            search.tell(config, Measurement(times_ms=(factor * time_ms(config),)))
    return found


def test_beside_a_model_the_mix_goes_to_the_best_family_before_each_was_tried() -> None:
    asked = asked_ahead(Search([thinned("fast"), thinned("slow")], model=Knowing("fast")), 30, slow=1.3)
    mixed = [each.config.family for each in asked if each.source in module.MIX]
    assert len(mixed) == 30 // module.EXPLORE_EVERY
    assert mixed.count("fast") == 4


def test_beside_a_model_a_family_that_is_behind_has_a_tenth_of_the_mix() -> None:
    asked = asked_ahead(Search([thinned("fast"), thinned("slow")], model=Knowing("fast")), 300, slow=2.0)
    mixed = [each.config.family for each in asked[150:] if each.source in module.MIX]
    assert mixed.count("slow") == len(mixed) // module.BEHIND_EVERY == 3


@pytest.mark.parametrize("slow", first(1, [2.0, 0.9]))
def test_first_configs_that_a_model_doubts_wait_for_a_trial_of_their_family(slow: float) -> None:
    fast, other = thinned("fast"), thinned("slow")
    defaults = [(min(each.configs, key=time_ms), "default") for each in (fast, other)]
    seed = sorted(fast.configs, key=time_ms)[1], "seed"
    doubted = [(config, "model") for config in (*other.configs[:8], defaults[1][0])]
    search = Search([fast, other], first=[*defaults, *doubted, seed], model=Knowing("fast"))
    sources = [each.source for each in asked_ahead(search, 40, slow)]
    assert sources[:4] == ["default", "default", "seed", "learned"]
    assert sources.count("model") == (8 if slow < 1 else 0)


def test_misuse_is_refused() -> None:
    with pytest.raises(TuningError, match="at least one candidate"):
        Search([FamilySpace(family="none", knobs=(), configs=())])
    with pytest.raises(TuningError, match="scale_ms"):
        Search([SPACE], scale_ms=0.0)
    search = Search([SPACE])
    with pytest.raises(TuningError, match="was asked"):
        search.tell(SPACE.configs[0], Failure(stage="build", reason="x"))
    proposal = search.ask()
    assert proposal is not None
    search.tell(proposal.config, outcome(proposal.config))
    with pytest.raises(TuningError, match="once"):
        search.tell(proposal.config, outcome(proposal.config))


def test_neighbours_are_one_step_apart() -> None:
    spec, device = Specialization.parse("fwd-bf16-d64-causal"), find_device("h200")
    space = FamilySpace.of(FAMILIES[0], spec, device)
    lattice, config = Lattice(space), default_config(spec, device)
    found = lattice.neighbours(config)
    assert len(found) > 3
    assert config not in found
    assert set(found) <= set(space.configs)
    for other in found:
        (knob,) = (knob for knob in space.knobs if other[knob.name] != config[knob.name])
        step = abs(knob.values.index(other[knob.name]) - knob.values.index(config[knob.name]))
        assert step == 1 or any(type(value) is not int for value in knob.values)
    assert lattice.nearest(config, [*found, config]) == config


def test_nearest_prefers_few_and_short_steps() -> None:
    lattice = Lattice(SPACE)
    wanted = SPACE.configs[0].replace(num_stages=2, loads="pointer")
    near, far = wanted.replace(num_stages=3), wanted.replace(loads="descriptor")
    assert lattice.nearest(wanted, [far, near]) == near
    assert lattice.nearest(wanted, [far, wanted]) == wanted
