"""How programs of decoding are grouped: heads of a sequence side by side, and hardly a program left out."""

from __future__ import annotations

import pytest

from flashgen.launch.decode_numbers import LEFT_OUT, side_by_side


@pytest.mark.parametrize("programs", [1, 2, 108, 132, 264, 396, 528])
def test_groups_have_heads_of_a_sequence_and_leave_few_programs_out(programs: int) -> None:
    for heads in (1, 2, 3, 4, 8, 12, 28, 32, 40, 71, 96, 128, 1000):
        groups, beside = side_by_side(heads, programs)
        assert heads % beside == 0
        assert programs * (1 - LEFT_OUT) <= groups * beside <= programs
        more = [each for each in range(beside + 1, heads + 1) if heads % each == 0]
        assert all(each > programs or programs % each > LEFT_OUT * programs for each in more)


def test_what_serves_on_an_h200() -> None:
    assert [side_by_side(8, 132 * per_sm) for per_sm in (1, 2, 3, 4)] == [(16, 8), (33, 8), (49, 8), (66, 8)]
    assert side_by_side(71, 132) == (132, 1)
