"""What `scripts/role_captures.py` takes for a value that a role is handed too early."""

from __future__ import annotations

import pytest

from scripts.role_captures import overwritten

SUMMED = """
    @%p1 st.shared.b32 [ %r1 + 0 ], %r2;
    bar.sync 	0, 128;
    ld.shared.b32 	%r808, [global_smem+197632];
    add.s32 	%r61, %r808, 1;
{between}
    st.shared.v2.b32 	[global_smem+198488], {{0, 67305985}};
    st.shared.b32 	[{place}], %r61;
{begin}
    ld.shared.b32 	%r27, [global_smem+197632];
"""
SUM, BEGIN = "global_smem+197632", "    barrier.sync 	1;"


@pytest.mark.parametrize(
    ("between", "place", "begin", "found"),
    [
        ("", SUM, BEGIN, [SUM]),
        ("    bar.sync 	0, 128;", SUM, BEGIN, []),
        ("", "global_smem+198000", BEGIN, []),
        ("", "%r5", BEGIN, ["%r5"]),
        ("", SUM, "", []),
    ],
    ids=["too early", "barrier", "another place", "any place", "no roles"],
)
def test_a_place_that_others_read_is_written_behind_a_barrier(
    between: str, place: str, begin: str, found: list[str]
) -> None:
    assert overwritten(SUMMED.format(between=between, place=place, begin=begin)) == found


def test_a_barrier_on_one_of_two_ways_is_none_on_the_other() -> None:
    around = """
    @%p7 bra 	$L__BB0_2;
    bar.sync 	0, 128;
$L__BB0_2:"""
    assert overwritten(SUMMED.format(between=around, place=SUM, begin=BEGIN)) == [SUM]


@pytest.mark.parametrize("table", ["$L_brx_0: .branchtargets", "$L_brx_0:\n    .branchtargets"])
def test_what_roles_themselves_read_and_write_is_another_matter(table: str) -> None:
    roles = f"""{BEGIN}
$L__BB0_4:
    {table}
        $L__BB0_5,
        $L__BB0_6;
    brx.idx 	%r1, $L_brx_0;
$L__BB0_5:
    ld.shared.b32 	%r3, [{SUM}];
    st.shared.b32 	[{SUM}], %r4;
    bra.uni 	$L__BB0_4;
$L__BB0_6:
    ret;
"""
    assert overwritten(SUMMED.format(between="    bar.sync 	0, 128;", place=SUM, begin=roles)) == []
