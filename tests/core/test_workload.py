"""Workloads: canonical at birth, readable keys, visible pairs by closed form, errors that state the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Specialization, Workload

small = st.integers(0, 9)
window = st.none() | st.integers(0, 6)


@given(sq=small, sk=small, causal=st.booleans(), left=window, right=window)
def test_visible_pairs_are_counted_pair_by_pair(
    sq: int, sk: int, causal: bool, left: int | None, right: int | None
) -> None:
    work = Workload(
        batch=1,
        nheads=1,
        seqlen_q=sq,
        seqlen_k=sk,
        head_dim=16,
        causal=causal,
        window_left=left,
        window_right=right,
    )
    reach = 0 if causal else right
    count = 0
    for i in range(sq):
        for j in range(sk):
            place = i + sk - sq
            count += (reach is None or j <= place + reach) and (left is None or j >= place - left)
    assert work.visible_pairs == count


@given(
    batch=st.integers(0, 64),
    group=st.sampled_from([1, 2, 4]),
    nheads_k=st.integers(1, 8),
    sq=st.integers(0, 5000),
    sk=st.integers(0, 5000),
    dv=st.sampled_from([64, 128]),
    causal=st.booleans(),
    left=window,
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
)
def test_a_key_is_read_back(
    batch: int, group: int, nheads_k: int, sq: int, sk: int, dv: int, causal: bool, left: int | None, dtype: str
) -> None:
    work = Workload(
        dtype=dtype,
        batch=batch,
        nheads=nheads_k * group,
        nheads_k=nheads_k,
        seqlen_q=sq,
        seqlen_k=sk,
        head_dim=64,
        head_dim_v=dv,
        causal=causal,
        window_left=left,
    )
    assert Workload.parse(work.key) == work
    assert Specialization.parse(work.specialization.key) == work.specialization


def test_the_documented_key() -> None:
    work = Workload.parse("b4-h32-hk8-s4096-d128-causal")
    assert work.key == "fwd-bf16-b4-h32-hk8-sq4096-sk4096-d128-causal"
    assert work.flops == 2 * 4 * 32 * (4096 * 4097 // 2) * 256
    assert Workload.parse("bwd-" + work.key[4:]).flops == int(2.5 * work.flops)
    assert work.bytes == 2 * (4 * 4096 * 40 * 256) + 4 * 4 * 32 * 4096


def test_a_window_that_hides_nothing_is_no_window() -> None:
    full = Workload.parse("b1-h1-s128-d64")
    assert Workload.parse("b1-h1-s128-d64-wl300-wr256") == full
    assert Workload.parse("b1-h1-s128-d64-causal-wr5") == Workload.parse("b1-h1-s128-d64-causal")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("b1-h4-hk3-s8-d64", "multiple of nheads_k, got 4 and 3"),
        ("b1-h4-s8", "lacks"),
        ("b1-h4-s8-sq9-d64", "repeats seqlen_q"),
        ("b1-h4-s8-d64-cuasal", "'cuasal'"),
        ("b1-h0-s8-d64", "nheads must be at least 1, got 0"),
        ("b1-h1-s8-d0", "head_dim must be at least 1, got 0"),
        ("b1-h1-s8-d64-page0", "page_size must be at least 1, got 0"),
    ],
)
def test_a_wrong_shape_names_the_rule_and_the_value(text: str, rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        Workload.parse(text)


@pytest.mark.parametrize("text", ["fwd-bf16", "fwd-bf16-d64-b3", "fwd-bf16-d64-upside"])
def test_a_wrong_specialization_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError):
        Specialization.parse(text)


def test_what_is_compiled_in_does_not_depend_on_sizes() -> None:
    one, other = Workload.parse("b1-h2-s7-d64-causal"), Workload.parse("b9-h8-hk2-sq33-sk900-d64-causal")
    assert one.specialization == other.specialization
    assert one.specialization.key == "fwd-bf16-d64-causal"
    unaligned = Specialization.of(one, aligned16=False, offset_tensor=True)
    assert unaligned.key == "fwd-bf16-d64-causal-unaligned-offset"
    assert unaligned.family_key == one.specialization.family_key
