"""The memory benchmark without a GPU: the line through its rows, and what it asks for."""

from __future__ import annotations

import pytest

from benchmarks.memory import (
    fit_of,
    memory_grid,
    memory_impls,
    savings,
    tensors_bytes,
    training_grid,
    training_impls,
)
from tests.benchmarks.rows import memory_row


def test_grid_reaches_from_1k_to_64k() -> None:
    assert [w.seqlen_k for w in memory_grid()] == [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert {(w.batch, w.nheads, w.head_dim) for w in memory_grid()} == {(1, 16, 128)}
    assert [impl.name for impl in memory_impls()] == ["flashgen", "flashgen-lse", "sdpa-flash", "standard"]


def test_a_line_is_found_and_a_parabola_is_not_taken_for_one() -> None:
    straight = [memory_row(w, "flashgen-lse", 64 * w.seqlen_k + 512) for w in memory_grid()]
    curved = [memory_row(w, "standard", 64 * w.seqlen_k**2) for w in memory_grid()]
    line, parabola = fit_of(straight + curved, "flashgen-lse"), fit_of(straight + curved, "standard")
    assert line is not None
    assert parabola is not None
    assert line.bytes_per_token == pytest.approx(64)
    assert line.constant_bytes == pytest.approx(512)
    assert line.r2 == pytest.approx(1.0)
    assert parabola.r2 < 0.97


def test_nothing_is_a_line_and_two_points_are_none() -> None:
    flat = fit_of([memory_row(w, "flashgen", 0) for w in memory_grid()], "flashgen")
    assert flat is not None
    assert (flat.bytes_per_token, flat.constant_bytes, flat.r2) == (0.0, 0.0, 1.0)
    assert fit_of([memory_row(w, "flashgen", 0) for w in memory_grid()[:2]], "flashgen") is None


def test_both_passes_are_measured_at_the_lengths_of_the_claims() -> None:
    grid = training_grid()
    assert {w.seqlen_k for w in grid} >= {2048, 4096}
    assert {(w.direction, w.batch, w.nheads) for w in grid} == {("backward", 1, 16)}
    assert [impl.name for impl in training_impls()] == ["flashgen", "sdpa-flash", "standard"]


def test_a_saving_is_of_all_memory_of_one_workload() -> None:
    one, two = training_grid()[1:3]
    assert tensors_bytes(one) == 8 * 16 * 2048 * 64 * 2
    rows = [memory_row(one, "standard", 9 * tensors_bytes(one), suite="training_memory")]
    rows += [memory_row(one, "flashgen", 0, suite="training_memory"), memory_row(two, "flashgen", 0)]
    rows += [memory_row(two, "standard", 1, suite="training_memory")]
    assert savings(rows) == {one: pytest.approx(10.0)}
