"""What tables and records say of configs on a workload: ratios in one unit, and nothing where nobody knows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.search_synthetic import synthetic
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure, Measurement
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.tuning.regrets import LEAST_CONFIGS, known_of, right_ms
from tests.db.samples import H100, MEASURED
from tests.tuning.fakes import H200

WORKLOAD = Workload.parse("b4-h16-s4096-d128")
TABLE = synthetic(WORKLOAD, H200, families=("hopper_forward",), most=40)
RECORD = replace(MEASURED, workload=WORKLOAD, device=H200, config=TABLE.trials[0].config)


def with_times(log: SearchLog, factor: float, count: int) -> SearchLog:
    trials = tuple(
        replace(trial, outcome=trial.outcome.times(factor) if isinstance(trial.outcome, Measurement) else trial.outcome)
        for trial in log.trials[:count]
    )
    return replace(log, trials=trials)


def test_ratios_are_to_the_best_of_the_table_and_a_failure_is_no_time() -> None:
    (known,) = known_of([RECORD], [TABLE], H200)
    times = right_ms(TABLE)
    assert min(known.ratios.values()) == 1
    for trial in TABLE.trials:
        if isinstance(trial.outcome, Failure):
            assert known.regret(trial.config) == math.inf
        else:
            assert known.regret(trial.config) == pytest.approx(times[trial.config] / min(times.values()))
    assert known.regret(TABLE.trials[0].config.replace(block_n=64, v_stages=2, warpgroups=1)) is None


def test_a_record_alone_knows_its_winner_and_nothing_else() -> None:
    (known,) = known_of([RECORD], [], H200)
    assert known.regret(RECORD.config) == 1
    assert known.regret(TABLE.trials[1].config) is None
    assert known_of([replace(RECORD, device=H100)], [], H200) == []


def test_tables_of_one_workload_are_joined_in_one_unit() -> None:
    """The second was measured on a card twice as slow; what only it has is compared by what both have."""
    whole, half = TABLE, with_times(TABLE, 2.0, 25)
    (both,) = known_of([RECORD], [half, replace(whole, trials=whole.trials[10:])], H200)
    (one,) = known_of([RECORD], [whole], H200)
    finite = [trial.config for trial in whole.trials if one.ratios[trial.config] < math.inf]
    assert both.ratios.keys() == one.ratios.keys()
    for config in finite:
        assert both.ratios[config] == pytest.approx(one.ratios[config], rel=0.05)  # levels begin elsewhere


def test_few_configs_without_the_winner_say_nothing() -> None:
    few = replace(TABLE, trials=TABLE.trials[1:LEAST_CONFIGS])
    (known,) = known_of([RECORD], [few], H200)
    assert not known.ratios
    assert known_of([replace(RECORD, config=few.trials[0].config)], [few], H200)[0].ratios
    assert known_of([], [replace(few, trials=TABLE.trials[: LEAST_CONFIGS + 1])], H200)[0].ratios


def test_a_table_of_another_device_is_refused() -> None:
    with pytest.raises(TuningError, match="got one of sm90-132sm-80gb"):
        known_of([], [synthetic(WORKLOAD, H100, families=("hopper_forward",), most=5)], H200)
    with pytest.raises(TuningError, match="nobody knows which"):
        known_of([], [replace(TABLE, search=None)], H200)


def test_a_config_that_is_slow_on_one_profile_of_lengths_is_slow() -> None:
    workload = Workload.parse("b4-h16-s4096-d128-varlen")
    assert TABLE.search is not None
    first, second = (trial.config for trial in TABLE.trials[:2])
    times = {first: (1.0, 3.0), second: (1.1, 2.0)}  # the first is the faster one where all lengths are the same
    trials = tuple(
        replace(
            TABLE.trials[0],
            workload=workload,
            config=config,
            outcome=Measurement(times_ms=(same,) * 3, profile_times_ms=(("ramp", (ramp,) * 3),)),
        )
        for config, (same, ramp) in times.items()
    )
    log = replace(TABLE, search=replace(TABLE.search, workload=workload), trials=trials)
    found = right_ms(log)
    assert found[first] / found[second] == pytest.approx((1 + 3) / (1.1 + 2))
