"""Backward classes that differ in determinism alone: whose records serve the calls of the other one."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families import FAMILIES
from tests.db.samples import H100
from tests.runtime.ladders import PLAIN_GRADIENT, SAME_BITS, Ladder, default, tuned


def test_a_record_of_sums_in_no_order_never_serves_a_deterministic_call(ladder: Ladder) -> None:
    ladder.user(tuned(PLAIN_GRADIENT, "hopper_backward_fused", 4))
    assert ladder.resolve(PLAIN_GRADIENT).rung == 3
    served = ladder.resolve(SAME_BITS)
    assert (served.rung, served.config) == (8, default(SAME_BITS))
    assert next(row for row in FAMILIES if row.id == served.config.family).is_deterministic
    # not even a row that claims to be deterministic
    ladder.user(replace(tuned(PLAIN_GRADIENT, "hopper_backward_fused", 4), workload=SAME_BITS))
    served = ladder.resolve(SAME_BITS)
    assert served.rung == 8
    assert "its sums have no fixed order, and the call is deterministic" in served.skipped[0]


def test_what_won_without_determinism_serves_with_it_if_it_is_of_the_default_s_family(ladder: Ladder) -> None:
    record = tuned(PLAIN_GRADIENT, "hopper_backward_split", 4)
    ladder.user(tuned(NEAR_GRADIENT, "portable_backward_split", 1), record)
    served = ladder.resolve(SAME_BITS)
    assert (served.rung, served.config, served.is_exact) == (5, record.config, False)
    own = tuned(replace(SAME_BITS, seqlen_q=128, seqlen_k=128), "portable_backward_split", 1)
    ladder.user(own)  # far away, of another family, but of the class
    assert ladder.resolve(SAME_BITS).config == own.config


NEAR_GRADIENT = replace(PLAIN_GRADIENT, batch=2)


def test_a_plain_call_takes_no_slower_family_from_the_deterministic_class(ladder: Ladder) -> None:
    ladder.user(tuned(SAME_BITS, "hopper_backward_split", 4))
    served = ladder.resolve(PLAIN_GRADIENT)
    assert (served.rung, served.config) == (8, default(PLAIN_GRADIENT))
    assert served.config.family == "hopper_backward_fused"


def test_twins_of_other_devices_do_not_serve(ladder: Ladder) -> None:
    ladder.user(tuned(PLAIN_GRADIENT, "hopper_backward_split", 4, H100))
    assert ladder.resolve(SAME_BITS).rung == 8
