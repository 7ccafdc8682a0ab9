"""Which calls copy q, k and v that are not aligned to 16 bytes."""

from __future__ import annotations

import pytest

from flashgen.core.workload import Workload
from flashgen.runtime.ops.calls import may_copy


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


@pytest.mark.parametrize("pages", ["", "-page16"])
def test_packed_sequences_are_not_copied(pages: str) -> None:
    """Their caches may be of any size."""
    assert not may_copy(Workload.parse(f"fwd-bf16-b4-h4-tq512-sq512-sk512-d64{pages}-varlen"))
