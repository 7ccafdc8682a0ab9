"""Which calls copy q, k and v that are not aligned to 16 bytes."""

from __future__ import annotations

import pytest

from flashgen.core.input_copies import as_served, has_aligned_rows, may_copy, of_copies
from flashgen.core.workload import Workload


@pytest.mark.parametrize(
    ("shape", "is_copied"),
    [
        ("b1-h16-s1024-d128", False),
        ("b2-h16-s1024-d128", True),
        ("b2-h16-s1024-d128-causal", False),
        ("b8-h32-hk8-sq17-sk8192-d128", True),
        ("b64-h32-hk8-sq16-sk8192-d128", False),
    ],
)
def test_calls_with_much_to_do_are_copied(shape: str, is_copied: bool) -> None:
    """No call of few queries: it would copy a cache for each of its tokens."""
    forward, backward = (Workload.parse(f"{direction}bf16-{shape}") for direction in ("", "bwd-"))
    assert may_copy(forward) == may_copy(backward) == is_copied


def test_the_batch_decides_nothing_where_bits_must_not_depend_on_it() -> None:
    for batch in (1, 64):
        workload = Workload.parse(f"bf16-b{batch}-h16-s1024-d128")
        assert not may_copy(workload, batch_invariant=True)
    assert may_copy(Workload.parse("bf16-b1-h16-s2048-d128"), batch_invariant=True)


def test_packed_sequences_are_copied_and_pages_are_not() -> None:
    """Caches may be of any size."""
    packed, paged = (
        Workload.parse(f"fwd-bf16-b4-h16-tq16384-sq4096-sk4096-d64{pages}-varlen") for pages in ("", "-page16")
    )
    assert may_copy(packed)
    assert not may_copy(paged)
    assert not may_copy(paged, batch_invariant=True)
    for queries, keys in ((512, 512), (16, 4096)):
        small = Workload.parse(f"fwd-bf16-b4-h4-tq512-sq{queries}-sk{keys}-d64-varlen")
        assert not may_copy(small)
        assert may_copy(small, batch_invariant=True), "a neighbour would decide"


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ("bf16-b1-h32-s4096-d100", (104, 104)),
        ("fp16-b1-h32-s4096-d36-dv129", (40, 136)),
        ("fp32-b1-h32-s4096-d101", (104, 104)),
        ("bf16-b1-h32-s4096-d104", (104, 104)),
        ("bf16-b1-h32-s128-d100", (100, 100)),  # little to do
        ("bf16-b1-h32-sq1-sk4096-d100", (100, 100)),
    ],
)
def test_dense_rows_of_no_multiple_of_16_bytes_are_those_of_copies(shape: str, columns: tuple[int, int]) -> None:
    workload = Workload.parse(shape)
    found = as_served(workload)
    assert (found.head_dim, found.head_dim_v) == columns
    assert has_aligned_rows(of_copies(workload))
    assert found == workload.with_shape(head_dim=columns[0], head_dim_v=columns[1])
