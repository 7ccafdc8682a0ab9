"""Shapes and strides: what counts as aligned, what a descriptor is told, and offsets that 32 bits hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashgen.launch.geometry import Geometry, aligned16, clamp_offset, legal_strides, scalars


def contiguous(batch: int = 2, nheads: int = 4, nheads_k: int = 2, sq: int = 8, sk: int = 9, d: int = 64) -> Geometry:
    q, k, v = (torch.empty(batch, h, s, d) for h, s in ((nheads, sq), (nheads_k, sk), (nheads_k, sk)))
    return Geometry.of(q, k, v, torch.empty_like(q))


def test_a_geometry_is_that_of_the_tensors() -> None:
    q, k = torch.empty(2, 8, 4, 64).transpose(1, 2), torch.empty(2, 2, 9, 64)
    v, out = torch.empty(2, 2, 9, 32), torch.empty(2, 4, 8, 32)
    geometry = Geometry.of(q, k, v, out)
    assert geometry.tensor("q") == ((2, 4, 8, 64), (2048, 64, 256, 1))
    assert geometry.tensor("v") == ((2, 2, 9, 32), (576, 288, 32, 1))
    assert geometry.tensor("o") == ((2, 4, 8, 32), (1024, 256, 32, 1))
    found = scalars(geometry)
    sizes = {"nheads": 4, "group_size": 2, "seqlen_q": 8, "seqlen_k": 9, "q_offset": 1, "lse_rows": 0}
    assert {name: found[name] for name in sizes} == sizes
    assert [found[f"stride_q{axis}"] for axis in "bhs"] == [2048, 64, 256]
    assert [found[f"stride_o{axis}"] for axis in "bhs"] == [1024, 256, 32]


def test_heads_that_share_keys_have_an_axis_of_their_own() -> None:
    q, k = torch.empty(2, 8, 6, 64).transpose(1, 2), torch.empty(2, 2, 9, 64)
    geometry = Geometry.of(q, k, k, torch.empty(2, 6, 8, 64))
    assert geometry.described("q", 5) == ((2, 2, 3, 8, 64), (3072, 192, 64, 384, 1))
    assert geometry.described("o", 5) == ((2, 2, 3, 8, 64), (3072, 1536, 512, 64, 1))
    assert geometry.described("k", 4) == ((2, 2, 9, 64), (1152, 576, 64, 1))
    assert contiguous(batch=1, nheads=2, nheads_k=2, sq=1).described("q", 5)[1] == (16, 64, 16, 16, 1)


@pytest.mark.parametrize(("sizes", "empty"), [({}, False), ({"sq": 0}, True), ({"sk": 0}, True), ({"batch": 0}, True)])
def test_nothing_to_compute_is_seen(sizes: dict[str, int], empty: bool) -> None:
    assert contiguous(**sizes).is_empty is empty


@pytest.mark.parametrize("letter", "qkvo")
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_one_odd_stride_of_a_dimension_in_use_is_not_aligned(letter: str, axis: int, element_bytes: int) -> None:
    geometry = contiguous()
    assert aligned16(geometry, 0x1000, element_bytes)
    strides = geometry.tensor(letter)[1]
    for step, fits in ((16 // element_bytes, True), (16 // element_bytes - 1, False), (1, False)):
        changed = replace(
            geometry, **{f"{letter}_strides": tuple(s + step * (i == axis) for i, s in enumerate(strides))}
        )
        assert aligned16(changed, 0x1000, element_bytes) is fits


def test_a_dimension_of_size_one_may_have_any_stride() -> None:
    """Nothing ever steps over it; torch gives it whatever stride a view left there."""
    geometry = contiguous(batch=1, nheads=1, nheads_k=1, sq=1, sk=1)
    odd = {f"{letter}_strides": (1, 3, 5, 1) for letter in "qkvo"}
    assert aligned16(replace(geometry, **odd), 0x1000, 2)
    for sizes in ({"batch": 2}, {"nheads": 2}, {"sq": 2}, {"sk": 2}):
        larger = contiguous(**{"batch": 1, "nheads": 1, "nheads_k": 1, "sq": 1, "sk": 1, **sizes})
        assert not aligned16(replace(larger, **odd), 0x1000, 2)


@pytest.mark.parametrize("pointers", [1, 2, 4, 8, 0x1008, 15])
def test_an_odd_pointer_is_not_aligned(pointers: int) -> None:
    assert not aligned16(contiguous(), pointers, 2)
    assert aligned16(contiguous(), pointers * 16, 2)


def test_every_pointer_counts() -> None:
    """Or-ed together, one odd pointer among aligned ones still shows."""
    assert not aligned16(contiguous(), 0x1000 | 0x2000 | 0x3002, 2)


sizes = st.integers(1, 5)
strides = st.tuples(*[st.integers(0, 4096)] * 3)


@given(shape=st.tuples(sizes, sizes, sizes), steps=strides)
def test_an_aligned_tensor_has_legal_strides_that_address_the_same_elements(
    shape: tuple[int, int, int], steps: tuple[int, int, int]
) -> None:
    steps = tuple(8 * step if size > 1 else step for size, step in zip(shape, steps, strict=True))  # type: ignore[assignment]
    geometry = replace(contiguous(), q_shape=(*shape, 64), q_strides=(*steps, 1), o_strides=(*[64] * 3, 1))
    assert aligned16(geometry, 0, 2)
    legal = legal_strides(*geometry.tensor("q"))
    assert all(step * 2 % 16 == 0 for step in legal[:3])
    assert legal[3] == 1
    last = [size - 1 for size in shape]
    assert sum(i * s for i, s in zip(last, legal, strict=False)) == sum(i * s for i, s in zip(last, steps, strict=True))


lengths = st.integers(1, 40)


@given(seqlen_q=lengths, seqlen_k=lengths, offset=st.integers(-(2**40), 2**40) | st.integers(-60, 60))
def test_clamping_an_offset_never_changes_which_pairs_are_visible(seqlen_q: int, seqlen_k: int, offset: int) -> None:
    clamped = clamp_offset(offset, contiguous(1, 1, 1, seqlen_q, seqlen_k))
    assert -seqlen_q <= clamped <= seqlen_k
    assert clamp_offset(clamped, contiguous(1, 1, 1, seqlen_q, seqlen_k)) == clamped

    def visible(shift: int) -> list[int]:
        return [max(0, min(row + shift + 1, seqlen_k)) for row in range(seqlen_q)]

    assert visible(clamped) == visible(offset)


def test_the_default_offset_needs_no_clamping() -> None:
    for seqlen_q, seqlen_k in ((1, 100), (100, 1), (7, 7)):
        geometry = contiguous(sq=seqlen_q, sk=seqlen_k)
        default = scalars(geometry)["q_offset"]
        assert default == seqlen_k - seqlen_q == clamp_offset(default, geometry)
