"""Tiles that have all keys and write dq: where they serve, and that nothing launches them with more keys."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest

from flashgen.codegen.families import balanced, beside, default_config, fitted, invalid, most_keys, poor_at_sizes, usual
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.errors import LaunchError
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.data_kinds import HARD_KINDS
from flashgen.measure.odd_shapes import odd_shapes
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.predict import predict_all

H200 = find_device("h200")
PLAIN = Specialization.parse("bwd-bf16-d64")
WRITES = HOPPER_BACKWARD_FUSED.default(PLAIN, H200).replace(dq_conversion="none")
BERT = Sizes(batch=32, nheads=12, nheads_k=12, seqlen_q=128, seqlen_k=128)
LONGER = BERT._replace(seqlen_k=129)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("bwd-b32-h12-s128-d64", True),
        ("bwd-b1-h8-s128-d128-causal", True),
        ("bwd-fp16-b64-h8-s77-d64-causal", True),
        ("bwd-b4-h8-sq4096-sk77-d40", True),
        ("bwd-b2-h32-hk8-s100-d96", True),
        ("bwd-b32-h12-s129-d64", False),
        ("bwd-b64-h16-s128-d128", True),  # where the split family serves many tiles of more keys
        ("bwd-b32-h12-s128-d64-deterministic", False),
        ("bwd-b32-h12-s128-d64-softcap", False),
        ("bwd-b32-h12-s128-d64-wl64", False),
        ("bwd-b32-h12-s64-d256", False),
    ],
)
def test_they_serve_up_to_128_keys_without_features(key: str, written: bool) -> None:
    workload = Workload.parse(key)
    spec, sizes = specialization(workload), Sizes.of(workload)
    default = default_config(spec, H200)
    found = balanced(default, spec, sizes, H200)
    assert (found.get("dq_conversion", "") == "none") is written
    assert usual(default, spec, sizes, H200) == found
    assert found in {default, *beside(default, spec, H200)}
    assert invalid(found, spec, H200) is None
    assert (most_keys(found) is not None) is written


def test_they_walk_over_as_many_heads_and_queries_as_others() -> None:
    shared = Workload.parse("bwd-b2-h8-sq4096-sk77-d64")
    grouped = Workload.parse("bwd-b8-h32-hk2-s128-d64")
    for workload, knob, value in ((shared, "query_shares", 4), (grouped, "heads_per_tile", 2)):
        spec = specialization(workload)
        found = balanced(default_config(spec, H200), spec, Sizes.of(workload), H200)
        assert (found["dq_conversion"], found[knob]) == ("none", value)


def test_a_warpgroup_is_ahead_where_there_are_steps_for_it_and_tiles_that_share_queries_have_no_loop() -> None:
    for key, staggered, persistent in (
        ("bwd-b32-h12-s128-d64", False, True),
        ("bwd-b16-h20-sq1024-sk77-d64", True, True),
        ("bwd-b2-h24-sq4096-sk128-d128", True, False),
    ):
        spec = specialization(workload := Workload.parse(key))
        found = balanced(default_config(spec, H200), spec, Sizes.of(workload), H200)
        assert (found["stagger_warpgroups"], found["persistent"]) == (staggered, persistent)


def test_a_record_of_the_other_family_does_not_serve_few_keys() -> None:
    spec = Specialization.parse("bwd-bf16-d128")
    record = HOPPER_BACKWARD_SPLIT.default(spec, H200)
    assert balanced(record, spec, BERT, H200) == balanced(HOPPER_BACKWARD_FUSED.default(spec, H200), spec, BERT, H200)
    assert balanced(record, spec, LONGER, H200).family == HOPPER_BACKWARD_SPLIT.id


def test_a_launch_with_more_keys_is_refused() -> None:
    main = HOPPER_BACKWARD_FUSED.kernels(PLAIN, WRITES)[1]
    assert main.programs(H200, BERT) == 132
    assert [kernel.entry.rsplit("_")[-1] for kernel in HOPPER_BACKWARD_FUSED.kernels(PLAIN, WRITES)] == [
        "prepare",
        "main",
    ]
    with pytest.raises(LaunchError, match="tiles that write dq have all keys, at most 128, got seqlen_k 129"):
        main.programs(H200, LONGER)
    assert "at most {BLOCK_N.value}, got seqlen_k" in render(PLAIN, WRITES).text


def test_a_record_of_few_keys_is_served_with_sums_where_there_are_more() -> None:
    assert fitted(WRITES, PLAIN, BERT, H200) == WRITES
    assert fitted(WRITES, PLAIN, LONGER, H200) == WRITES.replace(dq_conversion="kernel")
    assert poor_at_sizes(WRITES, BERT) is None
    assert "at most 128" in str(poor_at_sizes(WRITES, LONGER))
    for keys in (129, 1000, 5000):
        found = balanced(WRITES, PLAIN, BERT._replace(seqlen_k=keys, seqlen_q=keys), H200)
        assert found["dq_conversion"] == "kernel"


def test_a_search_tries_them_where_they_can_be_launched() -> None:
    for key, tried in (
        ("bwd-b32-h12-s128-d64", {"kernel", "tiles", "none"}),
        ("bwd-b2-h12-s2048-d64", {"kernel", "tiles"}),
    ):
        spaces = {space.family: space.configs for space in Candidates.of(Workload.parse(key), H200).spaces}
        assert {config["dq_conversion"] for config in spaces[HOPPER_BACKWARD_FUSED.id]} == tried


@pytest.mark.parametrize(
    "key", ["bwd-bf16-d64-window", "bwd-bf16-d64-varlen", "bwd-bf16-d64-alibi", "bwd-bf16-d64-keymask"]
)
def test_with_features_they_are_not_valid(key: str) -> None:
    spec = Specialization.parse(key)
    config = HOPPER_BACKWARD_FUSED.default(spec, H200).replace(dq_conversion="none")
    assert invalid(config, spec, H200) == "one tile has all keys where there is nothing but a causal mask"


def test_there_is_no_memory_for_sums() -> None:
    def floats(conversion: str) -> int:
        pieces = HOPPER_BACKWARD_FUSED.scratch(PLAIN, WRITES.replace(dq_conversion=conversion), BERT)
        return sum(piece.shape[0] * piece.shape[1] for piece in pieces if piece.name == "dq_acc")

    assert floats("none") == 0
    assert floats("kernel") == 32 * 12 * 128 * 64


def test_the_gate_has_shapes_that_they_can_be_launched_with() -> None:
    for key in ("bwd-bf16-d64", "bwd-fp16-d128-causal"):
        spec = Specialization.parse(key)
        shapes, usual_ones = odd_shapes(spec, most_keys(WRITES)), odd_shapes(spec)
        assert max(shape.seqlen_k for shape in shapes) == 128
        assert {shape.data for shape in shapes} >= set(HARD_KINDS)
        assert len(shapes) >= 10
        assert any(shape.q_offset is not None and shape.q_offset < 0 for shape in shapes), "rows that see no key"
        assert max(shape.seqlen_k for shape in usual_ones) > 1000
    assert most_keys(HOPPER_BACKWARD_SPLIT.default(PLAIN, H200)) is None


def test_the_model_knows_what_sums_in_memory_cost() -> None:
    """On 14 raced shapes of an H200, from estimates of what kernels take."""
    times: dict[str, dict[str, float]] = {}
    with (Path(__file__).parent / "all_keys_nvidia_h200.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["family"] == HOPPER_BACKWARD_FUSED.id:
                own = times.setdefault(row["workload"], {})
                own[row["dq_conversion"]] = min(float(row["ms"]), own.get(row["dq_conversion"], math.inf))
    off = []
    for key, own in times.items():
        workload = Workload.parse(key)
        spec = specialization(workload)
        writes = balanced(default_config(spec, H200), spec, Sizes.of(workload), H200)
        adds = writes.replace(dq_conversion="kernel")
        expected = predict_all(workload, [writes, adds], H200)
        off.append(expected[adds] / expected[writes] / (own["kernel"] / own["none"]))
    assert len(off) == 14
    assert statistics.geometric_mean(off) > 0.9
    assert min(off) > 0.7
    assert max(off) < 1.05
