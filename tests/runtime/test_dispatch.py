"""The look-up ladder, rung by rung, over real databases; what it may never do, over random workloads."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from flashgen.codegen.families import FAMILIES, default_config, family, invalid, unsupported, usual, validate
from flashgen.codegen.family import Sizes
from flashgen.codegen.render import render
from flashgen.core.device import CATALOGUE, Device
from flashgen.core.errors import ConfigError, UnsupportedError
from flashgen.core.nearest import distance, position
from flashgen.core.record import TuningRecord
from flashgen.core.rungs import MEANINGS, RUNGS
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Layers
from flashgen.launch import nvml
from flashgen.launch.sdpa import BACKENDS
from flashgen.runtime.lookup.by_sizes import SizesLookup
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.handover import SDPA_IMPLS, sdpa_backend
from flashgen.runtime.lookup.ladder import ELSEWHERE_STEPS, resolve
from flashgen.runtime.lookup.records import Records
from tests.db.samples import H100, H200, HARD_TIMES, MEASURED, RTX_4090, hard, timed
from tests.runtime.ladders import CAUSAL, Ladder, config, default, faster, measured, predicted

SHIPPED = "shipped/some_device"
NEAR, FAR = CAUSAL.with_shape(seqlen_k=4608, seqlen_q=4608), CAUSAL.with_shape(seqlen_q=128, seqlen_k=128)
UNALIGNED = replace(CAUSAL.specialization, aligned16=False)


def test_an_explicit_config_is_above_everything(ladder: Ladder) -> None:
    ladder.user(measured())
    served = ladder.resolve(config=config(32))
    assert (served.rung, served.config, served.record, served.skipped) == (1, config(32), None, ())


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"block_m": 100}, H200, "knob block_m of portable_forward is one of"),
        ({"loads": "gather"}, H200, "knob loads"),
        ({}, RTX_4090, "cannot serve fwd-bf16-d128-causal on NVIDIA RTX 4090: descriptors are turned into pointers"),
        ({"block_n": 256, "num_stages": 5}, H200, "cannot serve fwd-bf16-d128-causal on NVIDIA H200: "),
    ],
)
def test_an_explicit_config_that_cannot_serve_is_an_error(
    changes: dict[str, int | str], device: Device, reason: str, ladder: Ladder
) -> None:
    ladder.user(measured())
    with pytest.raises(ConfigError, match=reason):
        ladder.resolve(device=device, config=config().replace(**changes))


def test_the_user_s_exact_record_is_above_the_shipped_one(ladder: Ladder) -> None:
    ladder.ship(measured(config=config(1)))
    served = ladder.resolve()
    assert (served.rung, served.config, served.layer) == (4, config(1), SHIPPED)
    assert served.skipped == ("3. user database, exact: no such record",)
    assert served.is_exact
    ladder.user(timed(measured(config=config(32)), 99.0))  # slower: it is the user's own measurement all the same
    served = ladder.resolve()
    assert (served.rung, served.config, served.layer) == (3, config(32), str(ladder.user_path))
    assert served.skipped == ()


def test_a_near_record_of_this_device_is_above_any_other_device_s(ladder: Ladder) -> None:
    ladder.ship(measured(device=H100, config=config(1)), measured(NEAR, config=config(32)))
    served = ladder.resolve()
    assert (served.rung, served.config) == (5, config(32))
    assert served.record is not None
    assert served.record.workload == NEAR
    assert not served.is_exact
    assert [line[:2] for line in served.skipped] == ["3.", "4."]


def test_another_device_s_record_comes_before_one_that_is_farther_by_more_than_a_step(ladder: Ladder) -> None:
    """Else one shape that a user tunes on his GPU would take the records of all others from him."""
    ladder.user(measured(FAR, config=config(32)))
    ladder.ship(measured(device=H100, config=config(1)))
    served = ladder.resolve()
    assert (served.rung, served.config) == (6, config(1))
    why = "5. nearest record on this device: another device's is nearer by more than 1 step"
    assert served.skipped[2:] == (why,)
    twice, more = (CAUSAL.with_shape(seqlen_k=rows) for rows in (2 * CAUSAL.seqlen_k, 2 * CAUSAL.seqlen_k + 64))
    ladder.user(measured(more, config=config(8)))
    assert ladder.resolve().rung == 6
    ladder.user(measured(twice, config=config(0)))
    assert (ladder.resolve().rung, ladder.resolve().config) == (5, config(0))
    assert [line[:2] for line in ladder.resolve(FAR.with_shape(batch=64)).skipped] == ["3.", "4."]


DECODE = CAUSAL.with_shape(seqlen_q=1)


def of_hopper(workload: Workload, **changes: int | str) -> TuningRecord:
    return measured(workload, config=default().replace(masked_blocks="branch", **changes))


def test_a_record_that_does_not_fit_the_sizes_leaves_the_call_to_the_next(ladder: Ladder) -> None:
    """One query position of four heads a group: a tile for each head would do four times the work of one for four."""
    ladder.user(of_hopper(DECODE.with_shape(batch=5), heads_per_group=8))
    served = ladder.resolve(DECODE)
    expected = default().replace(packed_heads=4, masked_blocks="branch", split_keys=True)
    assert (served.rung, served.config) == (8, expected)
    assert "in a tile it computes 128 tiles, where 32 would do" in served.skipped[2]
    packed = of_hopper(DECODE.with_shape(seqlen_q=3, nheads=64), packed_heads=8)
    ladder.user(packed)
    nearest = packed.config.replace(split_keys=True)
    assert (ladder.resolve(DECODE).rung, ladder.resolve(DECODE).config) == (5, nearest)
    assert ladder.resolve(CAUSAL).config["packed_heads"] == 1
    exact = of_hopper(DECODE, heads_per_group=8)
    ladder.user(exact)
    assert (ladder.resolve(DECODE).rung, ladder.resolve(DECODE).config) == (3, exact.config), "it was measured here"


# --- backward classes that differ in determinism alone --------------------------------------------------------------

PLAIN_GRADIENT = replace(CAUSAL, direction="backward", batch=1, nheads_k=CAUSAL.nheads)
SAME_BITS = replace(PLAIN_GRADIENT, deterministic=True)


def tuned(workload: Workload, family_id: str, order: int, device: Device = H200) -> TuningRecord:
    """A record of a family's default with another order of programs."""
    row = next(row for row in FAMILIES if row.id == family_id)
    chosen = row.default(workload.specialization, device).replace(heads_per_group=order)
    return measured(workload, device, config=validate(chosen))


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


def test_a_record_of_the_same_architecture_serves_where_this_device_has_none(ladder: Ladder) -> None:
    ladder.ship(measured(FAR, H100, config=config(1)), measured(NEAR, H100, config=config(32)))
    served = ladder.resolve()
    assert (served.rung, served.config) == (6, config(32))
    assert served.record is not None
    assert served.record.device == H100
    assert ladder.resolve(device=RTX_4090).rung == 8
    assert ladder.resolve(device=H100, workload=NEAR).rung == 4


def test_a_prediction_is_below_every_measurement_and_above_the_default(ladder: Ladder) -> None:
    ladder.user(predicted(config=config(1)), predicted(NEAR, config=config(0)))
    served = ladder.resolve()
    assert (served.rung, served.config) == (7, config(1))
    assert not served.is_exact
    ladder.ship(measured(FAR, H100, config=config(32)))
    served = ladder.resolve()
    assert (served.rung, served.config) == (6, config(32))


def test_a_prediction_for_another_device_serves_nobody_else(ladder: Ladder) -> None:
    ladder.user(predicted(device=H100))
    assert ladder.resolve().rung == 8


def test_without_records_the_default_serves_and_every_rung_says_why(ladder: Ladder) -> None:
    served = ladder.resolve()
    assert (served.rung, served.config, served.record, served.layer) == (8, default(), None, None)
    assert served.skipped == tuple(f"{rung}. {RUNGS[rung]}: no such record" for rung in range(3, 8))


@pytest.mark.parametrize("other", ["b4-h32-hk8-s4096-d64-causal", "b4-h32-hk8-s4096-d128", "fp16-b4-h32-s4096-d128"])
def test_a_record_serves_its_own_class_only(other: str, ladder: Ladder) -> None:
    ladder.user(measured())
    assert ladder.resolve(Workload.parse(other)).rung == 8


def test_a_record_that_cannot_serve_leaves_the_call_to_the_next(ladder: Ladder) -> None:
    """Unaligned tensors of a workload whose record uses descriptors."""
    ladder.user(measured(), measured(NEAR, config=config(1)), measured(FAR, config=config(32, "pointer")))
    served = ladder.resolve(spec=UNALIGNED)
    assert (served.rung, served.config) == (5, config(32, "pointer"))
    assert served.record is not None
    assert served.record.workload == FAR
    assert served.skipped[0].startswith("3. user database, exact: portable_forward(")
    assert served.skipped[0].endswith(
        "cannot serve: descriptors need pointers and strides that are multiples of 16 bytes"
    )
    assert served.skipped[1] == "4. shipped database, exact: no such record"
    assert ladder.resolve().config == config()


def test_a_user_s_record_that_cannot_serve_hides_no_shipped_one(ladder: Ladder) -> None:
    """Unaligned tensors of a workload whose own record uses descriptors and whose shipped one uses pointers."""
    ladder.user(measured())
    ladder.ship(measured(config=config(32, "pointer")))
    served = ladder.resolve(spec=UNALIGNED)
    assert (served.rung, served.config, served.layer) == (4, config(32, "pointer"), SHIPPED)
    assert served.is_exact
    assert served.skipped == (
        f"3. user database, exact: {config()} cannot serve: "
        "descriptors need pointers and strides that are multiples of 16 bytes",
    )
    served = ladder.resolve()
    assert (served.rung, served.config, served.layer) == (3, config(), str(ladder.user_path))


def test_a_default_serves_unaligned_tensors_where_no_record_can(ladder: Ladder) -> None:
    ladder.user(measured(), predicted(NEAR))
    served = ladder.resolve(spec=UNALIGNED)
    assert (served.rung, served.config["loads"]) == (8, "pointer")
    assert ["multiples of 16 bytes" in line for line in served.skipped] == [True, False, True, False, True]


def test_an_unsupported_workload_is_an_error_whatever_the_databases_hold(ladder: Ladder) -> None:
    ladder.user(measured())
    spec = replace(CAUSAL.specialization, page_size=16)
    with pytest.raises(UnsupportedError, match="portable_forward: it reads no paged keys"):
        ladder.resolve(spec=spec)


lengths = st.one_of(st.integers(0, 300), st.integers(1, 17).map(lambda n: 1 << n), st.integers(1, 200_000))
heads = st.tuples(st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from([1, 2, 4, 7, 32]))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    nheads_k, group = draw(heads)
    sizes = {"seqlen_q": draw(lengths), "seqlen_k": draw(lengths), "batch": draw(st.integers(0, 64))}
    return {**sizes, "nheads_k": nheads_k, "nheads": nheads_k * group}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """A user's database of 40 random shapes, measured on two devices, and some predictions."""
    folder = tmp_path_factory.mktemp("crowd")
    generator = random.Random(1)
    ladder = Ladder(user_path=folder / "user.sqlite3", shipped_folder=folder)
    for number in range(40):
        nheads_k = generator.choice([1, 2, 8])
        shape = CAUSAL.with_shape(
            batch=generator.choice([1, 2, 16]),
            nheads=nheads_k * generator.choice([1, 4, 8]),
            nheads_k=nheads_k,
            seqlen_q=generator.randint(1, 20_000),
            seqlen_k=generator.randint(1, 20_000),
        )
        loads = generator.choice(["pointer", "descriptor"])
        kind = predicted if number % 4 == 3 else measured
        ladder.user(kind(shape, H100 if number % 2 else H200, config=config(generator.choice([0, 1, 8, 32]), loads)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.db.layers.shipped", lambda name: folder / "none")
        return ladder.records()


@given(shape=shapes(), device=st.sampled_from([H200, H100]), aligned=st.booleans())
def test_the_record_that_serves_is_the_nearest_of_its_rung(
    crowd: Records, shape: dict[str, int], device: Device, aligned: bool
) -> None:
    workload = CAUSAL.with_shape(**shape)
    spec = Specialization.of(workload, aligned16=aligned)
    served = resolve(workload, spec, device, crowd)
    assert served.record is not None
    assert served.rung in (3, 5, 6)
    usable = [
        record
        for record, _ in crowd.of(spec, device)
        if record.provenance == "measured" and (aligned or record.config["loads"] == "pointer")
    ]
    assert served.record in usable
    far = [
        (distance(position(workload), position(record.workload)) + (record.device != device) * ELSEWHERE_STEPS)
        for record in usable
    ]
    assert far[usable.index(served.record)] == min(far)
    assert (served.rung == 6) == (served.record.device != device)
    assert served == resolve(workload, spec, device, crowd), "ties are broken in one way only"
    if min(shape.values()) and served.rung != 3:
        by_sizes = SizesLookup(crowd.choices(spec, device), workload, spec, device, crowd)
        found = by_sizes.config(Sizes.of(workload), generated_only=True, has_own_offset=True)
        assert found == served.config, "as every new length is"


@examples(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes(),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    dims=st.tuples(st.integers(16, 256), st.integers(16, 256)) | st.sampled_from([(64, 64), (128, 128), (256, 256)]),
    causal=st.booleans(),
    aligned=st.booleans(),
    offset_tensor=st.booleans(),
    device=st.sampled_from(CATALOGUE),
)
def test_the_ladder_never_fails_on_a_workload_that_a_family_supports(
    crowd: Records,
    shape: dict[str, int],
    dtype: str,
    dims: tuple[int, int],
    causal: bool,
    aligned: bool,
    offset_tensor: bool,
    device: Device,
) -> None:
    workload = Workload(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], causal=causal, **shape)
    spec = Specialization.of(workload, aligned16=aligned, offset_tensor=causal and offset_tensor)
    served = resolve(workload, spec, device, crowd)
    assert invalid(validate(served.config), spec, device) is None
    safe = usual(default_config(spec, device), spec, Sizes.of(workload), device)
    assert served.config == safe or served.record is not None


def test_records_of_a_class_are_read_once_for_a_device(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = Layers.of_class
    monkeypatch.setattr(Layers, "of_class", lambda self, *given: asked.append(given) or original(self, *given))
    records = ladder.records()
    for workload in (CAUSAL, NEAR, FAR):
        assert resolve(workload, workload.specialization, H200, records).rung == 8
        assert resolve(workload, replace(workload.specialization, aligned16=False), H100, records).rung == 8
    assert asked == [("fwd-bf16-d128-causal", H200), ("fwd-bf16-d128-causal", H100)]
    ladder.user(measured())
    assert resolve(CAUSAL, CAUSAL.specialization, H200, records).rung == 8
    assert ladder.resolve().rung == 3


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\x00" + b"\xff" * 5000], ids=["text", "torn"])
def test_a_layer_that_cannot_be_read_warns_and_the_next_serves(content: bytes, ladder: Ladder) -> None:
    ladder.ship(measured())
    ladder.user_path.write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{ladder.user_path.name} is not used"):
        served = ladder.resolve()
    assert (served.rung, served.layer) == (4, SHIPPED)


@pytest.mark.parametrize(
    "value", ["\"__import__('os').system('true')\"", "1000000", "true", "null", '{"a": 1}', "128.0"]
)
def test_a_hostile_value_is_skipped_with_a_warning_and_never_rendered(value: str, ladder: Ladder) -> None:
    import sqlite3

    ladder.user(measured(), measured(NEAR, config=config(0)))
    connection = sqlite3.connect(ladder.user_path)
    changed = connection.execute(
        "UPDATE records SET knobs = replace(knobs, '\"block_m\":128', '\"block_m\":' || ?) "
        "WHERE workload_id = (SELECT id FROM workloads WHERE key = ?)",
        (value, CAUSAL.key),
    )
    assert changed.rowcount == 1
    connection.commit()
    connection.close()
    with pytest.warns(UserWarning, match=r"records \d+ is ignored"):
        served = ladder.resolve()
    assert (served.rung, served.config) == (5, config(0))


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


def test_torch_serves_by_the_times_on_normal_data_alone(ladder: Ladder) -> None:
    """Its kernels are as fast on both kinds, and a winner of both nearly so."""
    ladder.user(hard(measured(baselines=faster("sdpa-flash", 1.1)), *HARD_TIMES))
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve(CAUSAL)) is None
    ladder.user(hard(measured(baselines=faster("sdpa-flash", 0.9)), 1.0, 1.0, 1.0))
    assert sdpa_backend(CAUSAL, CAUSAL.specialization, ladder.resolve(CAUSAL)) == "sdpa-flash"


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


def test_a_card_of_another_power_keeps_the_usual_ones_records_until_it_has_its_own(ladder: Ladder) -> None:
    lower = replace(H200, name="NVIDIA H200 NVL", power_w=600)
    ladder.ship(measured())
    served = resolve(CAUSAL, CAUSAL.specialization, lower, ladder.records())
    assert served.rung == 4
    explained = str(explain(CAUSAL, CAUSAL.specialization, lower, ladder.records()))
    assert "measured on the usual card of these sizes, NVIDIA H200" in explained
    own = measured(device=lower, config=config(1))
    ladder.ship(own)
    assert resolve(CAUSAL, CAUSAL.specialization, lower, ladder.records()).config == config(1)
    assert resolve(CAUSAL, CAUSAL.specialization, H200, ladder.records()).config == config(), "not the other way round"


def test_explain_names_the_backend_that_the_call_gets(ladder: Ladder) -> None:
    ladder.user(measured(baselines=faster("sdpa-cudnn")))
    records = ladder.records()
    arguments = (CAUSAL, CAUSAL.specialization, H200, records)
    assert explain(*arguments).backend == "sdpa-cudnn"
    assert explain(*arguments, generated_only=True).backend == "generated"
    assert explain(*arguments, config=config(1)).backend == "generated"
