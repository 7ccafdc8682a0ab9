"""Profiles of lengths, and the keys and sizes of steps of decoding."""

from __future__ import annotations

import pytest

from flashgen.core.errors import WorkloadError
from flashgen.core.lengths import ALL_PROFILES, PROFILES, lengths_of, packed_lengths, page_class
from flashgen.core.nearest import distance, position
from flashgen.core.workload import Specialization, Workload

KEY = "dec-bf16-b64-h32-hk8-sq1-sk8192-d128-page16"


@pytest.mark.parametrize("key", [KEY, f"{KEY}-ramp", "dec-fp16-b1-h64-hk8-sq4-sk1000-d64-wl127-causal-sink-tail"])
def test_a_key_is_read_back(key: str) -> None:
    workload = Workload.parse(key)
    assert workload.is_decode
    assert workload.key == key
    spec = workload.specialization
    assert Specialization.parse(spec.key) == spec


def test_a_step_has_one_query_and_no_edges_that_it_would_not_see() -> None:
    short = Workload.parse("dec-b64-h32-hk8-sk8192-d128-page16-causal")
    assert short.key == KEY, "the last query sees all keys before it anyway"
    assert Workload.parse("dec-b64-h32-hk8-sk8192-d128-wr5").window_right is None
    assert Workload.parse("dec-b64-h32-hk8-sq2-sk8192-d128-causal").causal
    windowed = Workload.parse("dec-b64-h32-hk8-sq2-sk8192-d128-causal-wl99")
    assert windowed.specialization.key == "dec-bf16-d128", "causal and a window are numbers of a launch"
    assert windowed.keys_reached == 101


def test_lengths_belong_to_decoding() -> None:
    for text in ("b1-h1-s64-d64-ramp", "bwd-b1-h1-s64-d64-same"):
        with pytest.raises(WorkloadError, match="lengths of a decode workload"):
            Workload.parse(text)
    with pytest.raises(WorkloadError, match="same, ramp, tail or empty"):
        Workload(direction="decode", batch=1, nheads=1, seqlen_q=1, seqlen_k=9, head_dim=64, lengths="long")


def test_profiles_follow_from_the_batch_alone() -> None:
    assert lengths_of("", 3, 640) == lengths_of("same", 3, 640) == (640, 640, 640)
    assert lengths_of("ramp", 4, 640) == (1, 214, 427, 640)
    assert lengths_of("tail", 4, 640) == (640, 10, 10, 10)
    assert all(lengths_of(name, batch, 0) == (0,) * batch for name in PROFILES for batch in (1, 2))
    assert [each.lengths for each in Workload.parse(KEY).profiles] == list(PROFILES)
    assert [each.lengths for each in Workload.parse("dec-b1-h1-sk64-d64").profiles] == ["same"]
    assert [each.lengths for each in Workload.parse(f"{KEY}-tail").profiles] == ["tail"]
    assert Workload.parse("b2-h1-s64-d64").profiles == ()


def test_what_is_read_and_computed_follows_the_lengths() -> None:
    row = 8 * (128 + 128) * 2
    by_profile = {each.lengths: each for each in Workload.parse("dec-b4-h32-hk8-sk640-d128-wl99").profiles}
    assert {name: w.cache_bytes for name, w in by_profile.items()} == {
        "same": 4 * 100 * row,
        "ramp": (1 + 3 * 100) * row,
        "tail": (100 + 30) * row,
    }
    flops = {name: w.flops // (2 * 32 * 256) for name, w in by_profile.items()}
    assert flops == {"same": 400, "ramp": 301, "tail": 130}
    assert Workload.parse("dec-b4-h32-hk8-sq4-sk2-d128-causal-same").visible_pairs == 3, "two queries see no key"


PACKED = "fwd-bf16-b16-h32-hk8-tq32768-sq8192-sk8192-d128-causal-varlen"


@pytest.mark.parametrize(
    "key",
    [
        PACKED,
        f"{PACKED}-tail".replace("fwd", "bwd"),
        "fwd-bf16-b64-h32-hk8-tq64-sq1-sk8192-d128-varlen-ramp",
        "fwd-fp16-b8-h2-hk1-tq40-tk300-sq30-sk100-d64-causal-varlen-mixed",
        "fwd-bf16-b16-h32-hk8-sq512-sk512-d128-varlen",
    ],
)
def test_a_key_of_packed_sequences_is_read_back(key: str) -> None:
    workload = Workload.parse(key)
    assert workload.is_packed
    assert workload.key == key.replace("-tq64-sq1-", "-sq1-"), "as many rows as there can be go without saying"
    assert Workload.parse(workload.key) == workload


def test_rows_that_no_sequence_can_have_are_not_there() -> None:
    assert Workload.parse("b4-h2-tq9999-s64-d64-varlen").total_q == 4 * 64
    assert Workload.parse("b4-h2-tq100-s64-d64-varlen").total_k == 100, "those of the queries"
    assert Workload.parse("b4-h2-tq100-sq64-sk80-d64-varlen").total_k == 4 * 80
    assert Workload.parse("b4-h2-s64-d64").total_q is None
    with pytest.raises(WorkloadError, match="total_q is of packed sequences"):
        Workload.parse("b4-h2-tq100-s64-d64")
    with pytest.raises(WorkloadError, match="total_k must be at least 0, got -1"):
        Workload(batch=1, nheads=1, seqlen_q=8, head_dim=64, varlen=True, total_k=-1)
    with pytest.raises(WorkloadError, match=r"of packed sequences .* same, close, ramp, tail, mixed or empty"):
        Workload(batch=1, nheads=1, seqlen_q=8, head_dim=64, varlen=True, lengths="short")


@pytest.mark.parametrize("profile", ALL_PROFILES)
@pytest.mark.parametrize(
    ("batch", "longest", "total"),
    [(16, 8192, 32768), (64, 2048, 16384), (7, 10, 70), (7, 10, 69), (5, 100, 3), (3, 50, 51), (1, 9, 4), (4, 8, 0)],
)
def test_lengths_of_packed_sequences_fill_the_rows(profile: str, batch: int, longest: int, total: int) -> None:
    found = packed_lengths(profile, batch, longest, total)
    assert len(found) == batch
    assert all(0 <= length <= longest for length in found)
    assert total - 1 <= sum(found) <= total


def test_profiles_of_packed_sequences_differ() -> None:
    assert packed_lengths("same", 4, 100, 160) == (40, 40, 40, 40)
    assert packed_lengths("close", 4, 79, 160) == (32, 38, 42, 48), "within a quarter of 40"
    assert packed_lengths("close", 4, 44, 160) == (37, 39, 41, 43), "and none above the bound"
    assert packed_lengths("ramp", 4, 79, 160) == (10, 31, 49, 70), "uniform, where the mean is half of the longest"
    assert packed_lengths("tail", 4, 100, 160) == (100, 20, 20, 20)
    assert packed_lengths("mixed", 8, 100, 160) == (1, 1, 1, 1, 1, 1, 77, 77)
    assert [each.lengths for each in Workload.parse(PACKED).profiles] == ["same", "ramp", "tail", "close"]
    assert [each.lengths for each in Workload.parse("b4-h2-s64-d64-varlen").profiles] == ["same"], "all are full"
    prefill = Workload.parse("b8-h2-tq40-tk300-sq30-sk100-d64-causal-varlen")
    assert [each.lengths for each in prefill.profiles] == ["same", "ramp", "tail", "mixed"]
    mixed = prefill.profiles[-1]
    assert mixed.each_seqlen_q == (1, 1, 1, 1, 1, 1, 17, 17)
    assert mixed.each_length == tuple(sorted(mixed.each_length)), "those of a ramp"


def test_what_packed_sequences_compute_follows_the_lengths() -> None:
    same, ramp, tail, close = Workload.parse("b4-h2-tq160-s79-d64-causal-varlen").profiles
    assert same.all_pairs == 4 * 40 * 41 // 2
    assert ramp.all_pairs == sum(n * (n + 1) // 2 for n in (10, 31, 49, 70))
    assert close.all_pairs == sum(n * (n + 1) // 2 for n in (32, 38, 42, 48))
    assert {each.bytes for each in (same, ramp, tail, close)} == {2 * (2 * 160 + 2 * 160) * 128 + 4 * 2 * 160}
    assert Workload.parse("b4-h2-tq160-s79-d64-causal-varlen").as_dense == Workload.parse("b2-h2-s79-d64-causal")


def test_packed_sequences_lie_where_dense_ones_of_as_many_rows_do() -> None:
    here = position(Workload.parse(PACKED))
    for key, steps in (
        (PACKED.replace("b16", "b9"), 0),
        (PACKED.replace("tq32768", "tq131072"), 1),
        ("b4-h32-hk8-s8192-d128-causal", 0),
    ):
        assert distance(here, position(Workload.parse(key))) == pytest.approx(steps), key


def test_pages_of_nearly_one_size_are_a_class() -> None:
    assert [page_class(size) for size in (None, 1, 2, 15, 16, 31, 48, 64, 100, 128, 256)] == [
        *(0, 1, 2, 2, 16, 16, 32, 64, 64, 128, 128)
    ]
    spec = Workload.parse("dec-b1-h8-sk64-d64-page48-sink").specialization
    assert (spec.workload_class, spec.key) == ("dec-bf16-d64-page32-sink", "dec-bf16-d64-page48-sink")
    packed = Workload.parse("b4-h8-s64-d64-varlen-page48").specialization
    assert (packed.workload_class, packed.former_class) == ("fwd-bf16-d64-page32-varlen", "fwd-bf16-d64-page48-varlen")
    assert packed.page_classes == tuple(f"fwd-bf16-d64-page{size}-varlen" for size in (1, 2, 16, 32, 64, 128))
    assert not Workload.parse("b4-h8-s64-d64-varlen").specialization.page_classes


def test_steps_are_as_far_apart_as_their_rows_keys_and_pairs() -> None:
    here = position(Workload.parse("dec-b16-h32-hk8-sk8192-d128"))
    for key, steps in (
        ("dec-b16-h32-hk8-sk8192-d128", 0),
        ("dec-b32-h32-hk8-sk8192-d128", 1),
        ("dec-b32-h16-hk4-sk8192-d128", 0),
        ("dec-b16-h32-hk8-sk2048-d128", 2),
        ("dec-b16-h32-hk8-sq4-sk8192-d128-causal", 2),
        ("dec-b16-h32-hk8-sk8192-d128-wl127", 6),
    ):
        assert distance(here, position(Workload.parse(key))) == pytest.approx(steps), key
