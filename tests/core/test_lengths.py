"""Profiles of lengths, and the keys and sizes of steps of decoding."""

from __future__ import annotations

import pytest

from flashgen.core.errors import WorkloadError
from flashgen.core.lengths import PROFILES, lengths_of, page_class
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


def test_pages_of_nearly_one_size_are_a_class() -> None:
    assert [page_class(size) for size in (None, 1, 2, 15, 16, 31, 48, 64, 100, 128, 256)] == [
        *(0, 1, 2, 2, 16, 16, 32, 64, 64, 128, 128)
    ]
    spec = Workload.parse("dec-b1-h8-sk64-d64-page48-sink").specialization
    assert (spec.workload_class, spec.key) == ("dec-bf16-d64-page32-sink", "dec-bf16-d64-page48-sink")
    assert Workload.parse("b1-h8-s64-d64-page48").specialization.workload_class == "fwd-bf16-d64-page48"


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
