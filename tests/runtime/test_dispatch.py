"""The look-up ladder, rung by rung, over real databases: which record serves, and which cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.core.device import Device
from flashgen.core.errors import ConfigError, UnsupportedError
from flashgen.core.rungs import RUNGS
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.ladder import resolve
from tests.db.samples import H100, H200, RTX_4090, timed
from tests.runtime.ladders import (
    CAUSAL,
    FAR,
    NEAR,
    SHIPPED,
    UNALIGNED,
    Ladder,
    config,
    default,
    measured,
    of_hopper,
    predicted,
)


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
    ladder.user(measured(FAR_AND_MANY, config=config(32)))
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


FAR_AND_MANY = FAR.with_shape(batch=32)
"""With programs for eight waves."""

DECODE = CAUSAL.with_shape(seqlen_q=1)


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
    ladder.ship(measured(FAR_AND_MANY, H100, config=config(32)))
    served = ladder.resolve()
    assert (served.rung, served.config) == (6, config(32))


def test_what_won_with_few_programs_over_the_hopper_family_serves_no_sizes_with_many(ladder: Ladder) -> None:
    """A bias of 16 heads of 512 tokens had such a record, whose config took twice as long with eight times as many."""
    ladder.user(measured(FAR, config=config(32)))
    near, many = FAR.with_shape(seqlen_k=192, seqlen_q=192), FAR.with_shape(batch=32)
    assert (ladder.resolve(near).rung, ladder.resolve(near).config) == (5, config(32))
    served = ladder.resolve(many)
    assert (served.rung, served.config.family) == (8, "hopper_forward")
    assert served.skipped[2].endswith("it won over hopper_forward with at most 660 programs, and here are 1024")
    ladder.user(measured(NEAR, config=config(1)))
    assert (ladder.resolve(many).rung, ladder.resolve(many).config) == (5, config(1)), "which won with many"


def test_of_the_preferred_family_any_record_serves(ladder: Ladder) -> None:
    ladder.user(of_hopper(FAR, heads_per_group=8))
    assert ladder.resolve(FAR_AND_MANY).rung == 5
    ladder.user(measured(FAR, config=config(32, "pointer")))
    served = resolve(FAR_AND_MANY, UNALIGNED, H200, ladder.records())
    assert (served.rung, served.config) == (5, config(32, "pointer")), "no other family takes such pointers"


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
