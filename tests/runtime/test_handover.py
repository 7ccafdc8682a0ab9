"""Which calls without a record of their own go to torch's attention, and which records of a twin serve plain ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

import flashgen
from flashgen.codegen.families import default_config
from flashgen.core.nearest import distance, position
from flashgen.core.record import TuningRecord
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.db.store import Store
from flashgen.runtime.lookup import handover
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.handover import FasterBackend, faster_backend, sdpa_backend
from flashgen.runtime.ops import runs
from tests.db.samples import H100, H200, hard, timed
from tests.fakes.gpu import FakeGpu, tensor
from tests.runtime.ladders import (
    CAUSAL,
    PLAIN_GRADIENT,
    SAME_BITS,
    Ladder,
    config,
    faster,
    measured,
    of_hopper,
    predicted,
    tuned,
)

FP32 = Workload.parse("fp32-b1-h16-s4096-d128-causal")
TWICE_THE_BATCH, TWICE_AS_LONG = FP32.with_shape(batch=2), FP32.with_shape(seqlen_q=8192, seqlen_k=8192)
SHORTER = FP32.with_shape(seqlen_q=128, seqlen_k=128)


def by_pointers(
    workload: Workload, impl: str = "sdpa-efficient", speedup: float = 2.5, **changes: object
) -> TuningRecord:
    """A record beside which a backend of torch was faster."""
    return measured(workload, config=config(8, "pointer"), baselines=faster(impl, 1 / speedup), **changes)  # type: ignore[arg-type]


def found(ladder: Ladder, workload: Workload, spec: Specialization | None = None) -> FasterBackend:
    backend = faster_backend(workload, spec or workload.specialization, ladder.resolve(workload, spec=spec))
    assert backend is not None
    return backend


def served_by(ladder: Ladder, workload: Workload, spec: Specialization | None = None) -> str | None:
    return sdpa_backend(workload, spec or workload.specialization, ladder.resolve(workload, spec=spec))


def test_what_torch_computed_faster_nearby_it_is_handed_here_too(ladder: Ladder) -> None:
    ladder.user(by_pointers(FP32))
    for workload in (FP32, TWICE_THE_BATCH, TWICE_AS_LONG, FP32.with_shape(nheads=12, nheads_k=12)):
        assert served_by(ladder, workload) == "sdpa-efficient"
    assert found(ladder, FP32).is_exact
    assert not found(ladder, TWICE_THE_BATCH).is_exact


@pytest.mark.parametrize(
    ("workload", "speedup", "obstacle"),
    [
        (FP32, 1.01, None),
        (TWICE_THE_BATCH, 1.26, None),
        (TWICE_THE_BATCH, 1.24, "less than the 1.25 by which ratios change between near workloads"),
        (TWICE_AS_LONG, 2.01, None),
        (TWICE_AS_LONG, 1.99, "less than the 2.00 by which ratios change between workloads"),
        (SHORTER, 9.0, "fewer than 256 queries or keys"),
    ],
)
def test_the_farther_the_record_the_more_it_has_to_show(
    workload: Workload, speedup: float, obstacle: str | None, ladder: Ladder
) -> None:
    ladder.user(by_pointers(FP32, speedup=speedup))
    assert served_by(ladder, workload) == (None if obstacle else "sdpa-efficient")
    assert (obstacle or "") in (found(ladder, workload).obstacle or "")


def test_a_short_workload_near_a_short_record_follows_it(ladder: Ladder) -> None:
    ladder.user(by_pointers(SHORTER))
    assert served_by(ladder, replace(SHORTER, batch=3)) == "sdpa-efficient"
    assert served_by(ladder, FP32) is None, "the record is too short to speak for long ones"


def test_the_nearest_record_decides(ladder: Ladder) -> None:
    ladder.user(by_pointers(FP32), measured(TWICE_AS_LONG, config=config(1, "pointer")))
    assert served_by(ladder, TWICE_THE_BATCH) == "sdpa-efficient"
    assert served_by(ladder, TWICE_AS_LONG.with_shape(batch=2)) is None


def test_a_record_of_another_gpu_has_to_show_what_a_far_one_has(ladder: Ladder) -> None:
    ladder.ship(by_pointers(FP32, speedup=1.9, device=H100))
    assert ladder.resolve(FP32).rung == 6
    assert served_by(ladder, FP32) is None
    ladder.ship(by_pointers(FP32, speedup=2.1, device=H100))
    assert served_by(ladder, FP32) == "sdpa-efficient"


def test_a_prediction_and_a_default_hand_nothing_over(ladder: Ladder) -> None:
    assert served_by(ladder, FP32) is None
    ladder.user(predicted(FP32, config=config(8, "pointer"), baselines=faster("sdpa-efficient", 0.1)))
    assert ladder.resolve(FP32).rung == 7
    assert served_by(ladder, FP32) is None


def test_a_backend_gets_no_call_of_a_kind_that_it_was_not_measured_on(ladder: Ladder) -> None:
    """torch's efficient kernel takes no heads that share keys, and none of its kernels takes empty tensors."""
    ladder.user(by_pointers(FP32))
    shared = FP32.with_shape(nheads_k=8)
    assert "heads share keys in one" in (found(ladder, shared).obstacle or "")
    assert "a tensor is empty" in (found(ladder, FP32.with_shape(batch=0)).obstacle or "")
    assert "more than 65535" in (found(ladder, FP32.with_shape(batch=65536)).obstacle or "")
    assert "not compute this workload" in (found(ladder, FP32.with_shape(seqlen_k=4097)).obstacle or "")
    assert "16 bytes" in (found(ladder, FP32, replace(FP32.specialization, aligned16=False)).obstacle or "")
    for workload in (shared, FP32.with_shape(batch=0), FP32.with_shape(batch=65536), FP32.with_shape(seqlen_k=4097)):
        assert served_by(ladder, workload) is None


def test_cudnn_gets_only_what_it_was_measured_on(ladder: Ladder) -> None:
    """It would take tens of milliseconds for each new length."""
    ladder.user(by_pointers(FP32, "sdpa-cudnn"))
    assert served_by(ladder, FP32) == "sdpa-cudnn"
    assert "plans every shape anew" in (found(ladder, TWICE_THE_BATCH).obstacle or "")
    assert served_by(ladder, TWICE_THE_BATCH) is None
    slower = (*faster("sdpa-cudnn", 0.3)[:1], *faster("sdpa-efficient", 0.4)[:1], *faster("sdpa-flash", 0.5)[:1])
    ladder.user(measured(FP32, config=config(8, "pointer"), baselines=slower))
    assert served_by(ladder, FP32) == "sdpa-cudnn"
    assert served_by(ladder, TWICE_THE_BATCH) == "sdpa-efficient"


def test_a_record_of_another_corner_of_the_mask_says_nothing(ladder: Ladder) -> None:
    """Few queries with a causal mask are a call of their own: torch's mask begins at the top left."""
    decode = CAUSAL.with_shape(seqlen_q=2)
    ladder.user(replace(of_hopper(decode, packed_heads=4), baselines=faster("sdpa-flash", 0.1)))
    square = CAUSAL.with_shape(seqlen_q=4, seqlen_k=4)
    assert ladder.resolve(square).rung == 5
    assert found(ladder, square).obstacle == "torch's call was another one there"


def test_backward_passes_and_score_functions_are_never_handed_over(ladder: Ladder) -> None:
    ladder.user(replace(tuned(PLAIN_GRADIENT, "hopper_backward_split", 4), baselines=faster("sdpa-cudnn", 0.1)))
    for workload in (PLAIN_GRADIENT, PLAIN_GRADIENT.with_shape(batch=2)):
        assert served_by(ladder, workload) is None
        shown = explain(workload, workload.specialization, H200, ladder.records())
        assert (shown.backend, shown.faster) == ("generated", None)


def test_the_policy_generated_keeps_inexact_calls_too(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder.user(by_pointers(FP32))
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    settings.cache_clear()
    assert served_by(ladder, TWICE_THE_BATCH) is None
    shown = str(explain(TWICE_THE_BATCH, TWICE_THE_BATCH.specialization, H200, ladder.records()))
    assert "backend    generated\n           sdpa-efficient was measured 2.50 times as fast" in shown
    assert "not served by it: FLASHGEN_POLICY=generated" in shown


def test_explain_says_what_the_backend_was_chosen_by(ladder: Ladder) -> None:
    ladder.user(by_pointers(FP32))
    shown = explain(TWICE_THE_BATCH, TWICE_THE_BATCH.specialization, H200, ladder.records())
    reason = "sdpa-efficient was measured 2.50 times as fast on the workload of the record below"
    assert f"backend    sdpa-efficient\n           {reason}\n" in str(shown)
    assert (shown.to_dict()["backend"], shown.to_dict()["backend_reason"]) == ("sdpa-efficient", reason)
    exact = explain(FP32, FP32.specialization, H200, ladder.records())
    assert "2.50 times as fast on this workload" in str(exact)
    ladder.user(by_pointers(FP32, speedup=1.2))
    kept = explain(TWICE_THE_BATCH, TWICE_THE_BATCH.specialization, H200, ladder.records())
    assert kept.backend == "generated"
    assert "1.20 times as fast" in str(kept)
    assert "; not served by it: that is less than the 1.25" in str(kept)


def test_calls_without_a_record_are_decided_once(gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder.user(by_pointers(CAUSAL, "sdpa-flash"))
    used: list[str] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **given: used.append(impl) or (lambda *call: call[0]))
    q, k, v = (tensor(2, h, 4096, 128) for h in (32, 8, 8))
    for _ in range(3):
        flashgen.attention(q, k, v, causal=True)
    assert (used, gpu.launched) == (["sdpa-flash"], [])
    assert flashgen.explain(q, k, v, causal=True).backend == "sdpa-flash"
    flashgen.attention(q, k, v, causal=True, return_lse=True)
    flashgen.attention(q, k, v, causal=True, q_offset=0)
    assert (used, len(gpu.launched)) == (["sdpa-flash"], 2)


def shipped_records() -> list[TuningRecord]:
    path = Path(flashgen.__file__).resolve().parents[1] / "tuning_db" / "nvidia_h200" / "records.sqlite3"
    with Store.open(path, read_only=True) as store:
        return store.all_records()


def test_ratios_of_shipped_records_change_by_less_than_is_asked_for() -> None:
    """The thresholds rest on this; one pair of a hundred may be what a measurement did."""
    near, far = [], []
    records = [record for record in shipped_records() if record.workload.direction == "forward" and record.baselines]
    for one, other in itertools.combinations(records, 2):
        a, b = one.workload, other.workload
        if a.specialization != b.specialization or (a.nheads == a.nheads_k) != (b.nheads == b.nheads_k):
            continue
        if a.causal and (a.seqlen_q != a.seqlen_k or b.seqlen_q != b.seqlen_k):
            continue
        ratios = {name: ms / one.time_ms for name, ms in _times(one).items()}  # type: ignore[operator]
        changes = [
            abs(math.log2(ratios[name] / (ms / other.time_ms))) for name, ms in _times(other).items() if name in ratios
        ]  # type: ignore[operator]
        if distance(position(a), position(b)) <= handover.NEAR:
            near += changes
        elif min(a.seqlen_q, a.seqlen_k, b.seqlen_q, b.seqlen_k) >= handover.SHORT:
            far += changes
    for changes, asked in ((near, handover.NEAR_SPEEDUP), (far, handover.FAR_SPEEDUP)):
        assert len(changes) >= 100
        assert sum(change > math.log2(asked) for change in changes) <= len(changes) / 100


def _times(record: TuningRecord) -> dict[str, float]:
    return {each.impl: each.median_ms for each in record.baselines if each.impl in handover.SDPA_IMPLS}


# --- a deterministic record that is faster than the plain one -------------------------------------------------------


def gradient(workload: Workload, order: int, ms: float) -> TuningRecord:
    """A record whose time is `ms`; deterministic ones are of the family in two passes."""
    family = "hopper_backward_split" if workload.deterministic else "hopper_backward_fused"
    return timed(tuned(workload, family, order), ms)


def test_a_deterministic_record_serves_plain_calls_where_it_is_faster(ladder: Ladder) -> None:
    plain, same_bits = gradient(PLAIN_GRADIENT, 4, 1.0), gradient(SAME_BITS, 8, 0.9)
    ladder.user(plain, same_bits)
    served = ladder.resolve(PLAIN_GRADIENT)
    assert (served.rung, served.config, served.record, served.slower) == (3, same_bits.config, same_bits, plain)
    assert ladder.resolve(SAME_BITS).slower is None
    shown = explain(PLAIN_GRADIENT, PLAIN_GRADIENT.specialization, H200, ladder.records())
    assert f"record     {SAME_BITS.key} in " in str(shown)
    assert "deterministic, and faster than the record of the workload itself:" in str(shown)
    assert f"1.0000 ms by {plain.config}" in str(shown)
    assert (shown.to_dict()["record_ms"], shown.to_dict()["slower_record_ms"]) == (0.9, 1.0)


@pytest.mark.parametrize(("ms", "serves"), [(0.96, True), (0.98, False), (1.0, False), (1.1, False)])
def test_it_has_to_be_faster_by_more_than_the_noise(ms: float, serves: bool, ladder: Ladder) -> None:
    ladder.user(gradient(PLAIN_GRADIENT, 4, 1.0), gradient(SAME_BITS, 8, ms))
    assert (ladder.resolve(PLAIN_GRADIENT).slower is not None) is serves


def test_times_on_hard_data_count_where_both_records_have_them(ladder: Ladder) -> None:
    ladder.user(hard(gradient(PLAIN_GRADIENT, 4, 1.0), 1.0), hard(gradient(SAME_BITS, 8, 0.9), 2.0))
    assert ladder.resolve(PLAIN_GRADIENT).slower is None
    ladder.user(hard(gradient(PLAIN_GRADIENT, 4, 1.0), 1.0, created="2026-11-21T12:00:00+00:00"))
    ladder.user(gradient(SAME_BITS, 8, 0.9))
    assert ladder.resolve(PLAIN_GRADIENT).slower is not None


def test_a_reference_that_is_slower_where_it_is_deterministic_does_not_count(ladder: Ladder) -> None:
    """torch's backward pass, which is the reference, takes 1.6 times as long when it must give the same bits."""
    plain, same_bits = gradient(PLAIN_GRADIENT, 4, 1.0), gradient(SAME_BITS, 8, 1.1)
    for record, ms in ((plain, 2.0), (same_bits, 3.2)):
        assert record.measurement is not None
        ladder.user(replace(record, measurement=replace(record.measurement, reference_ms=ms)))
    assert ladder.resolve(PLAIN_GRADIENT).slower is None


def test_only_records_of_this_workload_and_gpu_and_of_no_lower_layer_count(ladder: Ladder) -> None:
    plain = gradient(PLAIN_GRADIENT, 4, 1.0)
    ladder.user(
        plain, gradient(SAME_BITS.with_shape(batch=2), 8, 0.6), replace(gradient(SAME_BITS, 8, 0.5), device=H100)
    )
    assert ladder.resolve(PLAIN_GRADIENT).slower is None
    ladder.ship(gradient(SAME_BITS, 8, 0.5))
    assert ladder.resolve(PLAIN_GRADIENT).slower is None, "the user's own measurement is above shipped ones"


def test_a_twin_of_the_user_is_above_a_shipped_record(ladder: Ladder) -> None:
    ladder.ship(gradient(PLAIN_GRADIENT, 4, 1.0))
    ladder.user(gradient(SAME_BITS, 2, 0.5))
    served = ladder.resolve(PLAIN_GRADIENT)
    assert (served.rung, served.layer, served.skipped) == (3, str(ladder.user_path), ())
    assert served.slower == gradient(PLAIN_GRADIENT, 4, 1.0)


def test_a_faster_plain_record_never_serves_a_deterministic_call(ladder: Ladder) -> None:
    ladder.user(gradient(PLAIN_GRADIENT, 4, 0.5), gradient(SAME_BITS, 8, 1.0))
    served = ladder.resolve(SAME_BITS)
    assert (served.config, served.slower) == (gradient(SAME_BITS, 8, 1.0).config, None)
    ladder.user(tuned(PLAIN_GRADIENT.with_shape(batch=2), served.config.family, 2))
    assert not ladder.records().choices(SAME_BITS.specialization, H200).same_bits


def test_a_twin_that_cannot_serve_the_tensors_does_not(ladder: Ladder) -> None:
    unaligned = replace(PLAIN_GRADIENT.specialization, aligned16=False)
    own = timed(measured(PLAIN_GRADIENT, config=default_config(unaligned, H200)), 1.0)
    ladder.user(own, gradient(SAME_BITS, 8, 0.5))
    assert ladder.resolve(PLAIN_GRADIENT).slower == own
    served = ladder.resolve(PLAIN_GRADIENT, spec=unaligned)
    assert (served.rung, served.config, served.slower) == (3, own.config, None)


def test_warmup_compiles_what_a_twin_may_serve_with(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(gradient(PLAIN_GRADIENT, 4, 1.0), gradient(SAME_BITS, 8, 0.9))
    flashgen.warmup([PLAIN_GRADIENT])
    compiled = {each[1] for each in gpu.compiled}
    assert {gradient(PLAIN_GRADIENT, 4, 1.0).config, gradient(SAME_BITS, 8, 0.9).config} <= compiled


def test_one_query_under_a_causal_mask_goes_to_torch_without_the_mask(
    gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees every key, while torch's mask begins at the top left."""
    one = CAUSAL.with_shape(batch=64, seqlen_q=1)
    ladder.user(replace(of_hopper(one, packed_heads=4), baselines=faster("sdpa-flash", 0.1)))
    assert found(ladder, one).obstacle is None
    used: list[object] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **given: used.append(given) or (lambda *call: call[0]))
    q, k, v = (tensor(64, h, rows, 128) for h, rows in ((32, 1), (8, one.seqlen_k), (8, one.seqlen_k)))
    flashgen.attention(q, k, v, causal=True)
    flashgen.attention(q, k, v, causal=True, q_offset=0)
    assert (used, len(gpu.launched)) == ([{"causal": False, "bshd": False, "gqa": True}], 1)
