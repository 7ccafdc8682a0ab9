"""Records measured again: promises are kept or broken, and a race decides between two databases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.core.config import Config
from flashgen.core.record import Failure, Limits, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db.comparison import Pair, compare
from flashgen.db.past import Whole
from flashgen.tuning.retime import Check, boldest, checks, decided, race
from tests.db.samples import CAUSAL, CONFIG, H100, MEASURED, PREDICTED, SHORT, timed
from tests.tuning.fakes import FakeExecutor

OTHER = CONFIG.replace(num_warps=4)
BAD = Failure(stage="verify", reason="wrong")


def of(config: Config, time_ms: float) -> TuningRecord:
    return timed(MEASURED, time_ms, config=config)


def pairs_of(first: TuningRecord, second: TuningRecord) -> tuple[Pair, ...]:
    return compare(Whole(records=(first,)), Whole(records=(second,)))


def executor(*, first_ms: float = 2.0, second_ms: float = 2.0, broken: tuple[Config, ...] = ()) -> FakeExecutor:
    def time_ms(workload: Workload, config: Config) -> float:
        return first_ms if config == CONFIG else second_ms

    return FakeExecutor(time_ms=time_ms, broken_in_race=lambda config: BAD if config in broken else None)


@pytest.mark.parametrize(("second_ms", "verdict"), [(1.5, "second"), (1.998, "first"), (2.0, "first"), (2.5, "first")])
def test_a_race_decides_whatever_the_records_claim(second_ms: float, verdict: str) -> None:
    for claimed in (1.0, 9.0):
        (pair,) = pairs_of(of(CONFIG, 2.0), of(OTHER, claimed))
        after = decided(executor(second_ms=second_ms), pair)
        assert after.verdict == verdict
        assert after.taken.config == (OTHER if verdict == "second" else CONFIG)
        assert after.taken.time_ms == pytest.approx(second_ms if verdict == "second" else 2.0, rel=0.1)
        assert after.taken.versions.driver == "580", "as measured today"


def test_records_of_a_race_say_what_those_of_a_search_say() -> None:
    """What bounds the card, and how sure the race was: a merge stores them."""
    gpu = executor(second_ms=2.5)
    gpu.state = (("power_limit_w", 600.0), ("sm_clock_max_mhz", 1980.0))
    (pair,) = pairs_of(of(CONFIG, 2.0), of(OTHER, 1.0))
    taken = decided(gpu, pair).taken
    assert taken.limits == Limits(power_limit_w=600.0, max_sm_clock_mhz=1980.0)
    assert taken.measurement is not None
    assert taken.measurement.confidence == pytest.approx(1.0, abs=0.05)
    alone = race(gpu, CAUSAL, [CONFIG])[CONFIG]
    assert isinstance(alone, TuningRecord)
    assert alone.measurement is not None
    assert (alone.limits, alone.measurement.confidence) == (taken.limits, None), "nobody was there to be faster"


def test_what_does_not_run_here_wins_no_race() -> None:
    (pair,) = pairs_of(of(CONFIG, 2.0), of(OTHER, 1.0))
    assert decided(executor(broken=(OTHER,)), pair).verdict == "first"
    after = decided(executor(broken=(CONFIG,)), pair)
    assert (after.verdict, after.taken.config) == ("second", OTHER)
    after = decided(executor(broken=(CONFIG, OTHER)), pair)
    assert (after.verdict, after.taken) == ("undecided", pair.first)


def test_only_pairs_that_this_gpu_can_tell_are_raced() -> None:
    gpu = executor()
    pairs = [
        *pairs_of(replace(of(CONFIG, 2.0), device=H100), replace(of(OTHER, 1.8), device=H100)),
        *pairs_of(MEASURED, replace(MEASURED, workload=SHORT)),
        *pairs_of(MEASURED, MEASURED),
        *pairs_of(of(CONFIG, 2.0), of(CONFIG, 1.0)),
        *pairs_of(PREDICTED, replace(PREDICTED, predicted_ms=1.9)),
    ]
    assert [decided(gpu, pair) for pair in pairs] == pairs
    assert gpu.races == []


def test_the_boldest_claims_are_measured_first() -> None:
    records = [
        timed(MEASURED, ms, workload=CAUSAL.with_shape(batch=batch)) for batch, ms in ((1, 2.0), (2, 1.2), (3, 3.0))
    ]
    unknown = replace(MEASURED, workload=SHORT, measurement=replace(MEASURED.measurement, reference_ms=None))  # type: ignore[type-var]
    assert boldest([*records, PREDICTED, unknown], 2) == [unknown, records[1]]
    assert len(boldest(records, None)) == 3


def test_a_promise_is_kept_within_a_tenth() -> None:
    said: list[Check] = []
    found = checks(executor(first_ms=2.1), [of(CONFIG, 2.0), replace(MEASURED, device=H100)], said.append)
    assert found == said
    assert [check.is_kept for check in found] == [True]
    (broken,) = checks(executor(first_ms=2.6), [of(CONFIG, 2.0)], said.append)
    assert broken.slower == pytest.approx(0.3, abs=0.1)
    assert not broken.is_kept
    (failed,) = checks(executor(broken=(CONFIG,)), [of(CONFIG, 2.0)], said.append)
    assert (failed.slower, failed.is_kept, failed.now) == (None, False, BAD)


def test_a_promise_counts_beside_the_same_reference() -> None:
    """A card at its power limit is slower, and so is the reference kernel of the round."""
    gpu = executor(first_ms=2.6)
    now = race(gpu, CAUSAL, [CONFIG])[CONFIG]
    assert isinstance(now, TuningRecord)
    assert now.measurement is not None
    reference = now.measurement.reference_ms
    assert reference is not None
    cooler = of(CONFIG, 2.0)
    assert cooler.measurement is not None
    before = replace(
        cooler, baselines=now.baselines, measurement=replace(cooler.measurement, reference_ms=reference / 1.3)
    )
    assert Check(record=before, now=now).is_kept
    assert not Check(record=replace(before, baselines=()), now=now).is_kept
