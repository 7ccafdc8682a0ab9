"""Which calls with a record of their own go to torch's attention: where it was measured, and was faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.core.settings import settings
from flashgen.launch.sdpa import BACKENDS
from flashgen.runtime.lookup.handover import SDPA_IMPLS, sdpa_backend
from tests.db.samples import HARD_TIMES, hard
from tests.runtime.ladders import CAUSAL, UNALIGNED, Ladder, config, faster, measured


@pytest.mark.parametrize("impl", SDPA_IMPLS)
def test_a_backend_that_was_measured_faster_is_handed_the_call(impl: str, ladder: Ladder) -> None:
    ladder.user(measured(baselines=faster(impl)))
    served = ladder.resolve()
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, served) == impl
    assert impl in BACKENDS


@pytest.mark.parametrize(("impl", "factor"), [("sdpa-flash", 1.0), ("sdpa-flash", 1.5), ("fa3", 0.1), ("flex", 0.1)])
def test_a_tie_a_slower_one_and_what_is_not_of_torch_are_not(impl: str, factor: float, ladder: Ladder) -> None:
    ladder.user(measured(baselines=faster(impl, factor)))
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve()) is None


def test_the_policy_generated_hands_nothing_over(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder.user(measured(baselines=faster("sdpa-cudnn")))
    served = ladder.resolve()
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, served) == "sdpa-cudnn"
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    settings.cache_clear()
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, served) is None


def test_only_what_was_measured_is_handed_over(ladder: Ladder) -> None:
    """Not tensors of another alignment, not an explicit config; tests/runtime/test_handover.py has other shapes."""
    ladder.user(measured(baselines=faster("sdpa-flash")))
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve(config=config())) is None
    pointers = measured(config=config(8, "pointer"), baselines=faster("sdpa-flash"))
    ladder.user(pointers)
    assert ladder.resolve(spec=UNALIGNED).is_exact
    assert sdpa_backend(CAUSAL, UNALIGNED, ladder.resolve(spec=UNALIGNED)) is None
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve()) == "sdpa-flash"


def test_a_causal_mask_of_another_corner_is_not_handed_over(ladder: Ladder) -> None:
    """SDPA aligns a causal mask to the top left."""
    longer = CAUSAL.with_shape(seqlen_k=8192)
    full = replace(longer, causal=False)
    for workload in (longer, full):
        ladder.user(measured(workload, baselines=faster("sdpa-flash")))
    assert sdpa_backend(longer, longer.specialization, ladder.resolve(longer)) is None
    assert sdpa_backend(full, full.specialization, ladder.resolve(full)) == "sdpa-flash"


def test_torch_serves_by_the_times_on_normal_data_alone(ladder: Ladder) -> None:
    """Its kernels are as fast on both kinds, and a winner of both nearly so."""
    ladder.user(hard(measured(baselines=faster("sdpa-flash", 1.1)), *HARD_TIMES))
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve(CAUSAL)) is None
    ladder.user(hard(measured(baselines=faster("sdpa-flash", 0.9)), 1.0, 1.0, 1.0))
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve(CAUSAL)) == "sdpa-flash"
