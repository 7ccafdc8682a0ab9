"""Two databases side by side: times that were not taken in the same way decide nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.core.history import UNKNOWN, Origin, RunnerUp
from flashgen.core.record import TuningRecord, Versions
from flashgen.db.comparison import compare, why_incomparable
from flashgen.db.exchange import better
from flashgen.db.past import Whole
from tests.db.samples import CAUSAL, H100, MEASURED, PREDICTED, SHORT, hard, timed

FASTER = timed(MEASURED, 1.0, config=MEASURED.config.replace(num_warps=4))


def verdict(
    first: TuningRecord, second: TuningRecord, first_origin: Origin = UNKNOWN, second_origin: Origin = UNKNOWN
) -> str:
    (pair,) = compare(known(first, origin=first_origin), known(second, origin=second_origin))
    assert pair.taken == (second if pair.verdict == "second" else first)
    return pair.verdict


def known(*records: TuningRecord, origin: Origin = UNKNOWN) -> Whole:
    return Whole(records=records, origins={record.identity: origin for record in records})


def test_the_faster_of_two_that_compare_is_taken() -> None:
    assert verdict(MEASURED, FASTER) == "second"
    assert verdict(FASTER, MEASURED) == "first"
    assert verdict(MEASURED, MEASURED) == "same"
    assert verdict(PREDICTED, replace(PREDICTED, predicted_ms=1.6)) == "first"


def test_what_one_version_predicts_to_be_faster_is_taken_though_it_is_older() -> None:
    newer = replace(PREDICTED, predicted_ms=1.6, created="2026-11-21T12:00:00+00:00")
    assert newer.created > PREDICTED.created
    assert (verdict(PREDICTED, newer), verdict(newer, PREDICTED)) == ("first", "second")
    assert better(PREDICTED, newer)
    assert not better(newer, PREDICTED)
    other = replace(newer, versions=replace(newer.versions, flashgen="0.2.0"))
    assert better(other, PREDICTED), "two versions have two models, and the newer one is known to be so"


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": replace(MEASURED.versions, torch="2.13.0")},
        {"versions": replace(MEASURED.versions, triton="3.7.1")},
        {"versions": replace(MEASURED.versions, driver="590.1")},
        {"versions": replace(MEASURED.versions, flashgen="0.2.0")},
        {"baselines": ()},
        {"baselines": MEASURED.baselines[:1]},
        {"measurement": replace(FASTER.measurement, reference_ms=None)},  # type: ignore[type-var]
        {"measurement": hard(FASTER, 1.0).measurement},
    ],
)
def test_what_was_measured_in_another_way_is_undecided(changes: dict[str, object]) -> None:
    other = replace(FASTER, **changes)  # type: ignore[arg-type]
    assert verdict(MEASURED, other) == verdict(other, MEASURED) == "undecided"


def test_commits_of_one_version_compare() -> None:
    """Most commits change no kernel, and what a kernel is has a digest of its own."""
    commits = [replace(MEASURED.versions, flashgen=f"0.1.0+g{each}") for each in ("801eb5f1c2d3", "b7127f5aa012.dirty")]
    ours, theirs = (replace(each, versions=of) for each, of in zip((MEASURED, FASTER), commits, strict=True))
    assert verdict(ours, theirs) == verdict(MEASURED, theirs) == "second"
    predicted = [replace(PREDICTED, versions=of) for of in commits]
    assert verdict(predicted[0], replace(predicted[1], predicted_ms=1.6)) == "first"


def test_versions_that_nobody_wrote_down_compare_with_nothing() -> None:
    assert "not known" in str(
        why_incomparable(replace(MEASURED, versions=Versions()), replace(FASTER, versions=Versions()))
    )


def test_every_workload_of_either_side_has_a_pair() -> None:
    short, other = replace(MEASURED, workload=SHORT), replace(MEASURED, device=H100)
    pairs = compare(known(MEASURED, short, PREDICTED), known(FASTER, other, PREDICTED))
    told = [(pair.either.device.identity, pair.either.workload, pair.either.provenance, pair.verdict) for pair in pairs]
    assert told == [
        (MEASURED.device.identity, CAUSAL, "measured", "second"),
        (MEASURED.device.identity, CAUSAL, "predicted", "same"),
        (MEASURED.device.identity, SHORT, "measured", "first"),
        (H100.identity, CAUSAL, "measured", "second"),
    ]
    assert [pair.taken for pair in pairs] == [FASTER, PREDICTED, short, other]


def test_a_kernel_that_is_generated_no_more_loses() -> None:
    (pair,) = compare(known(FASTER), known(MEASURED), lambda record: record == MEASURED)
    assert (pair.verdict, pair.taken) == ("second", MEASURED)


def test_a_race_that_had_both_decides_whatever_the_versions() -> None:
    slower = timed(MEASURED, 1.2)  # a time of its own race, which says less than that it has beaten the other
    beaten = Origin(runners_up=(RunnerUp(config=FASTER.config, times_ms=(1.3,)),))
    assert verdict(slower, FASTER) == "second"
    assert verdict(slower, FASTER, beaten) == verdict(replace(slower, baselines=()), FASTER, beaten) == "first"
    assert verdict(FASTER, slower, second_origin=beaten) == "second"
