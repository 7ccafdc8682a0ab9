"""What `explain` tells of a look-up: the rung, the record and its age, the backend, and every family."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from flashgen.codegen.families import FAMILIES, family, unsupported
from flashgen.codegen.render import render
from flashgen.core.rungs import MEANINGS, RUNGS
from flashgen.launch import nvml
from flashgen.runtime.lookup.explanation import explain
from tests.db.samples import H200, HARD_TIMES, MEASURED, hard
from tests.runtime.ladders import CAUSAL, NEAR, SHIPPED, UNALIGNED, Ladder, config, faster, measured, predicted


def test_explain_names_the_rung_the_record_and_every_family(ladder: Ladder) -> None:
    made = (datetime.now(timezone.utc) - timedelta(days=3, hours=1)).isoformat()
    digest = render(CAUSAL.specialization, config()).digest
    ladder.ship(measured(created=made, baselines=faster("sdpa-flash", 2.0), source_digest=digest))
    text = str(explain(CAUSAL, CAUSAL.specialization, H200, ladder.records()))
    assert text.splitlines() == [
        f"workload   {CAUSAL.key}",
        "features   causal",
        "device     NVIDIA H200 (sm90-132sm-141gb)",
        "rung       4. shipped database, exact",
        f"           {MEANINGS[4]}",
        "backend    generated",
        f"config     {config()}",
        f"record     {CAUSAL.key} in {SHIPPED}: 1.2500 ms, {CAUSAL.flops / 1.25 / 1e9:.0f} TFLOP/s",
        f"           measured {made} (3 days ago), triton 3.6.0, torch 2.11.0",
        "           measured beside it: sdpa-flash 2.5000 ms, other 99.0000 ms",
        "skipped    3. user database, exact: no such record",
        *(f"family     {row.id}: {unsupported(row, CAUSAL.specialization, H200) or 'applies'}" for row in FAMILIES),
    ]


def test_explain_tells_the_time_on_hard_data_where_it_was_measured(ladder: Ladder) -> None:
    ladder.user(hard(measured(), *HARD_TIMES))
    found = explain(CAUSAL, CAUSAL.specialization, H200, ladder.records())
    assert "TFLOP/s, 2.4000 ms on hard data" in str(found)
    assert found.to_dict()["record_hard_ms"] == 2.4


def test_explain_for_machines_has_the_same_facts(ladder: Ladder) -> None:
    ladder.user(predicted(NEAR))
    facts = explain(CAUSAL, CAUSAL.specialization, H200, ladder.records()).to_dict()
    assert facts == {
        "workload": CAUSAL.key,
        "features": ["causal"],
        "specialization": "fwd-bf16-d128-causal",
        "device": "NVIDIA H200",
        "device_identity": "sm90-132sm-141gb",
        "rung": 7,
        "rung_name": "predicted record",
        "backend": "generated",
        "backend_reason": None,
        "family": "portable_forward",
        "knobs": dict(config().knobs),
        "layer": str(ladder.user_path),
        "record_workload": NEAR.key,
        "record_created": predicted().created,
        "record_provenance": "predicted",
        "record_ms": 1.5,
        "record_hard_ms": None,
        "record_profile_ms": {},
        "chosen_by": None,
        "expected_ratio": None,
        "expected_worst_ratio": None,
        "slower_record_ms": None,
        "mixed": None,
        "copies": False,
        "stale": True,
        "not_current": [],
        "few_queries": None,
        "skipped": [f"{rung}. {RUNGS[rung]}: no such record" for rung in range(3, 7)],
        "families": {row.id: unsupported(row, CAUSAL.specialization, H200) for row in FAMILIES},
    }


def test_families_that_apply_and_those_of_the_other_pass_have_their_words() -> None:
    for row in FAMILIES:
        if row.direction == "backward":
            assert unsupported(row, CAUSAL.specialization, H200) == "it computes the backward pass, not forward"
    assert unsupported(family(config().family), CAUSAL.specialization, H200) is None


def test_explain_says_that_nothing_was_measured(ladder: Ladder) -> None:
    explanation = explain(CAUSAL, CAUSAL.specialization, H200, ladder.records())
    assert "record     none: nothing was measured for this class of workloads" in str(explanation)
    assert not explanation.is_stale
    assert explanation.to_dict()["record_ms"] is None


@pytest.mark.parametrize("digest", ["current", "0123456789abcdef", ""])
def test_a_record_is_stale_once_its_template_has_changed(digest: str, ladder: Ladder) -> None:
    pointers = config(8, "pointer")
    current = render(CAUSAL.specialization, pointers).digest
    ladder.user(measured(config=pointers, source_digest=current if digest == "current" else digest))
    for spec in (CAUSAL.specialization, UNALIGNED, replace(CAUSAL.specialization, offset_tensor=True)):
        explanation = explain(CAUSAL, spec, H200, ladder.records())
        assert explanation.served.rung == 3
        # the kernel of unaligned tensors has another text, which says nothing about the record
        assert explanation.is_stale is (digest == "0123456789abcdef")
        assert ("stale: the template has changed since" in str(explanation)) is explanation.is_stale


def test_a_record_of_another_triton_serves_and_says_so(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder.user(measured())
    monkeypatch.setattr(nvml, "versions", lambda: replace(MEASURED.versions, triton="3.9.0"))
    explanation = explain(CAUSAL, CAUSAL.specialization, H200, ladder.records())
    assert explanation.served.rung == 3
    assert "not current: measured with triton 3.6.0, and 3.9.0 is here; it serves" in str(explanation)
    assert explanation.to_dict()["not_current"] == ["measured with triton 3.6.0, and 3.9.0 is here"]


def test_explain_names_the_backend_that_the_call_gets(ladder: Ladder) -> None:
    ladder.user(measured(baselines=faster("sdpa-cudnn")))
    records = ladder.records()
    arguments = (CAUSAL, CAUSAL.specialization, H200, records)
    assert explain(*arguments).backend == "sdpa-cudnn"
    assert explain(*arguments, generated_only=True).backend == "generated"
    assert explain(*arguments, config=config(1)).backend == "generated"
