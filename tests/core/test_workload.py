"""Workloads: canonical at birth, readable keys, visible pairs by closed form, errors that state the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.core.errors import WorkloadError
from flashgen.core.workload import BROADCASTS, DTYPE_BYTES, Specialization, Workload

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
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    bias=st.sampled_from(BROADCASTS),
    mask=st.sampled_from(BROADCASTS),
    flags=st.sets(st.sampled_from(["softcap", "alibi", "sink", "varlen"])),
)
def test_a_key_is_read_back(
    batch: int,
    group: int,
    nheads_k: int,
    sq: int,
    sk: int,
    dv: int,
    causal: bool,
    left: int | None,
    dtype: str,
    bias: str,
    mask: str,
    flags: set[str],
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
        bias=bias,
        mask=mask,
        **dict.fromkeys(flags, True),
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
        ("b1-h4-s8", "lacks d$"),
        ("b1-h4", r"needs b, h, s \(or sq\) and d, .* lacks s \(or sq\), d$"),
        ("dec-b1-h4-s8192-d64", "at most 16 queries of each sequence, and sk<n> keys, got 8192"),
        ("dec-b1-h4-d64", "needs b, h, sk and d, e.g. dec-.* lacks sk$"),
        ("B1-h4-s8-d64", "has 'B1'; did you mean b1"),
        ("b1-h4-s8-d64-Causal", "has 'Causal'; did you mean causal"),
        ("b1 h4 s8 d64", "with - between them; .* has 'b1 h4 s8 d64'$"),
        ("b1-h4-s8-sq9-d64", "repeats seqlen_q"),
        ("b1-h4-s8-d64-cuasal", "'cuasal'"),
        ("b1-h0-s8-d64", "nheads must be at least 1, got 0"),
        ("b1-h1-s8-d0", "head_dim must be at least 1, got 0"),
        ("b1-h1-s8-d64-bias-keybias", "'keybias' repeats bias"),
        ("b1-h1-s8-d64-keymask-mask", "'mask' repeats mask"),
        ("b1-h1-s8-d64-biases", "keybias, mask, keymask, with - .* has 'biases'"),
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
    assert unaligned.workload_class == one.specialization.workload_class


@pytest.mark.parametrize("name", ["nheads_k", "seqlen_k", "head_dim_v"])
def test_a_size_that_is_not_given_is_that_of_q_and_zero_is_zero(name: str) -> None:
    sizes = {"batch": 1, "nheads": 4, "seqlen_q": 32, "head_dim": 64}
    same = {"nheads_k": 4, "seqlen_k": 32, "head_dim_v": 64}[name]
    assert getattr(Workload(**sizes), name) == same
    assert Workload(**sizes, **{name: None}) == Workload(**sizes, **{name: same})
    least = 0 if name == "seqlen_k" else 1
    with pytest.raises(WorkloadError, match=f"{name} must be at least {least}, got {least - 1}"):
        Workload(**sizes, **{name: least - 1})


@pytest.mark.parametrize("text", ["b1-h4-hk0-s64-d64", "b1-h4-s64-d64-dv0", "b1-h4-s2147483648-d64", "b1-h4-s٣-d64"])
def test_a_key_with_a_size_that_no_tensor_has_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError):
        Workload.parse(text)


@pytest.mark.parametrize(
    "text", [None, 5, b"b1-h4-s64-d64", ["b1"], "b1-" * 1000, "b" + "9" * 5000, "fwd-bf16-d64-dv0"]
)
def test_what_is_no_key_is_refused_with_the_rule(text: object) -> None:
    for parse in (Workload.parse, Specialization.parse):
        with pytest.raises(WorkloadError) as caught:
            parse(text)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 600


def test_numbers_of_numpy_become_those_of_python() -> None:
    import numpy

    sizes = {
        "batch": numpy.int64(1),
        "nheads": numpy.int32(4),
        "seqlen_q": numpy.int64(9),
        "window_left": numpy.uint8(2),
    }
    work = Workload(**sizes, head_dim=64, causal=numpy.bool_(True))  # type: ignore[arg-type]
    assert work == Workload.parse("b1-h4-s9-d64-causal-wl2")
    assert {type(work.batch), type(work.seqlen_k), type(work.window_left)} == {int}
    assert work.causal is True


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(WorkloadError, match='"full", "keys" or empty, got \'rows\''):
        Workload(batch=1, nheads=1, seqlen_q=8, head_dim=64, bias="rows")
    with pytest.raises(WorkloadError, match=r"mask is .* got True"):
        Workload(batch=1, nheads=1, seqlen_q=8, head_dim=64, mask=True)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=r"window_left is None .* got -1"):
        Workload(batch=1, nheads=1, seqlen_q=8, head_dim=64, window_left=-1)


def test_kinds_of_bias_and_mask_have_their_tokens() -> None:
    work = Workload.parse("b1-h2-s64-d64-softcap-alibi-sink-keybias-mask")
    assert (work.bias, work.mask) == ("keys", "full")
    assert work.key == "fwd-bf16-b1-h2-hk2-sq64-sk64-d64-softcap-alibi-sink-keybias-mask"
    assert Workload.parse("b1-h2-s64-d64-bias-keymask").specialization.key == "fwd-bf16-d64-bias-keymask"


def test_tf32_is_fp32_in_memory() -> None:
    tf32, fp32 = Workload.parse("tf32-b1-h2-s64-d64"), Workload.parse("fp32-b1-h2-s64-d64")
    assert tf32.bytes == fp32.bytes
    assert tf32.specialization != fp32.specialization


def test_only_unusual_variants_are_in_a_specialization_and_its_key() -> None:
    biased, sunk = Workload.parse("b1-h2-s64-d64-bias"), Workload.parse("b1-h2-s64-d64-sink")
    plain = Workload.parse("b1-h2-s64-d64")
    assert Specialization.of(biased, bias_dtype="bf16") == biased.specialization
    assert Specialization.of(biased, bias_dtype="fp32").key == "fwd-bf16-d64-bias-bias_fp32"
    assert Specialization.of(biased, aligned_scores=False).key == "fwd-bf16-d64-bias-scattered"
    assert Specialization.of(sunk, sink_dtype="fp32") == sunk.specialization
    assert Specialization.of(sunk, sink_dtype="bf16").key == "fwd-bf16-d64-sink-sink_bf16"
    nothing = Specialization.of(plain, bias_dtype="fp32", sink_dtype="fp16", aligned_scores=False)
    assert nothing == plain.specialization
    tf32 = Workload.parse("tf32-b1-h2-s64-d64-bias")
    assert Specialization.of(tf32, bias_dtype="fp32") == tf32.specialization


@pytest.mark.parametrize(
    "key",
    [
        "fwd-bf16-d128-causal-window",
        "fwd-tf32-d72-keybias-keymask-window-unaligned-scattered-offset-bias_bf16",
        "fwd-fp16-d192-dv128-causal-sink-mask-scattered-sink_bf16",
        "bwd-bf16-d64-page16-softcap-alibi-varlen",
    ],
)
def test_a_specialization_key_is_read_back(key: str) -> None:
    assert Specialization.parse(key).key == key


def test_every_variant_of_a_class_shares_its_records() -> None:
    spec = Specialization.parse("fwd-bf16-d64-sink-bias-window-unaligned-scattered-offset-bias_fp32-sink_bf16")
    assert spec.workload_class == "fwd-bf16-d64-sink-bias-window"
