from __future__ import annotations

import itertools

from tests.covering import FACTORS, covering_array, forward_cases


def test_every_pair_of_values_meets() -> None:
    rows = covering_array(FACTORS)
    for one, other in itertools.combinations(FACTORS, 2):
        wanted = set(itertools.product(FACTORS[one], FACTORS[other]))
        assert {(row[one], row[other]) for row in rows} == wanted
    assert len(rows) <= 50


def test_an_array_is_the_same_every_time() -> None:
    assert forward_cases() == forward_cases()


def test_smaller_values_take_the_place_of_others() -> None:
    cases = forward_cases(dtype=("fp16", "fp32"), dims=((16, 16), (24, 40)))
    assert {case.dtype for case in cases} == {"fp16", "fp32"}
    assert {case.dims for case in cases} == {(16, 16), (24, 40)}
    assert len(cases) < 30
    assert len({case.title for case in cases}) == len(cases)
