"""Shapes and strides: gradients beside their tensors, what is aligned, what a descriptor is told, 32-bit offsets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch.backward import FIELDS, backward_geometry
from flashgen.launch.geometry import Geometry, aligned16, clamp_offset, legal_strides, scalars
from tests.fakes.imagined import SHAPE, backward_tensors


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
    sizes = {"nheads": 4, "group_size": 2, "seqlen_q": 8, "seqlen_k": 9, "q_offset": 1}
    assert {name: found[name] for name in sizes} == sizes
    assert [found[f"stride_q{axis}"] for axis in "bhs"] == [2048, 64, 256]
    assert [found[f"stride_o{axis}"] for axis in "bhs"] == [1024, 256, 32]


def test_numbers_of_four_tensors_are_those_that_they_have_beside_a_bias() -> None:
    plain = contiguous()
    beside = plain._replace(tensors=plain.tensors | {"bias": ((1, 4, 8, 9), (0, 72, 9, 1))})
    strides = {f"stride_bias_{axis}": 0 for axis in "bhqk"}
    assert scalars(plain) == scalars(beside) | strides
    assert scalars(beside)["stride_bias_h"] == 72


def test_heads_that_share_keys_have_an_axis_of_their_own() -> None:
    q, k = torch.empty(2, 8, 6, 64).transpose(1, 2), torch.empty(2, 2, 9, 64)
    geometry = Geometry.of(q, k, k, torch.empty(2, 6, 8, 64))
    assert geometry.described("q", 5) == ((2, 2, 3, 8, 64), (3072, 192, 64, 384, 1))
    assert geometry.described("o", 5) == ((2, 2, 3, 8, 64), (3072, 1536, 512, 64, 1))
    assert geometry.described("k", 4) == ((2, 2, 9, 64), (1152, 576, 64, 1))
    assert contiguous(batch=1, nheads=2, nheads_k=2, sq=1).described("q", 5)[1] == (16, 64, 16, 16, 1)


def with_strides(geometry: Geometry, **strides: tuple[int, ...]) -> Geometry:
    changed = {name: (geometry.tensor(name)[0], given) for name, given in strides.items()}
    return geometry._replace(tensors=geometry.tensors | changed)  # type: ignore[operator]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_one_odd_stride_of_a_dimension_in_use_is_not_aligned(name: str, axis: int, element_bytes: int) -> None:
    geometry = backward_geometry(backward_tensors())
    assert aligned16(geometry, 0x1000, element_bytes)
    assert not aligned16(geometry, 0x1000 | 0x2008, element_bytes)
    strides = geometry.tensor(name)[1]
    for step, fits in ((16 // element_bytes, True), (16 // element_bytes - 1, False), (1, False)):
        moved = tuple(s + step * (i == axis) for i, s in enumerate(strides))
        assert aligned16(with_strides(geometry, **{name: moved}), 0x1000, element_bytes) is fits


def test_a_dimension_of_size_one_may_have_any_stride() -> None:
    """Nothing ever steps over it; torch gives it whatever stride a view left there."""
    geometry = contiguous(batch=1, nheads=1, nheads_k=1, sq=1, sk=1)
    odd = dict.fromkeys("qkvo", (1, 3, 5, 1))
    assert aligned16(with_strides(geometry, **odd), 0x1000, 2)
    for sizes in ({"batch": 2}, {"nheads": 2}, {"sq": 2}, {"sk": 2}):
        larger = contiguous(**{"batch": 1, "nheads": 1, "nheads_k": 1, "sq": 1, "sk": 1, **sizes})
        assert not aligned16(with_strides(larger, **odd), 0x1000, 2)
    given = backward_tensors(shape=(1, 1, 1, 1, 9))
    dq = given.dq.as_strided(given.dq.shape, (1, 3, 5, 1))
    assert aligned16(backward_geometry(given._replace(dq=dq)), 0x1000, 2)


def test_bias_and_mask_have_an_alignment_of_their_own() -> None:
    q, k, v, out = (torch.empty(2, 4, 8, 64) for _ in range(4))
    odd = Features(bias=torch.empty(2, 4, 8, 9)[..., 1:], mask=torch.ones(2, 1, 8, 9).bool()[..., 1:])
    assert aligned16(Geometry.of(q, k, v, out, odd), 0x1000, 4)


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
    tensors = {"q": ((*shape, 64), (*steps, 1)), "o": ((*shape, 64), (*[64] * 3, 1))}
    geometry = contiguous()._replace(tensors=contiguous().tensors | tensors)
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


def test_every_tensor_has_its_shape_and_its_own_strides() -> None:
    given = backward_tensors("bwd-bf16-d192-dv128", bshd=True)
    features = Features(alibi_slopes=torch.ones(2, 6))
    geometry = backward_geometry(given, features)
    forward = Geometry.of(given.q, given.k, given.v, given.out, features)
    assert geometry.tensors.items() >= forward.tensors.items()
    found = scalars(geometry)
    for name, field in FIELDS.items():
        tensor = getattr(given, field)
        assert geometry.tensor(name) == (tuple(tensor.shape), tensor.stride())
        assert tuple(found[f"stride_{name}{axis}"] for axis in "bhs") == tensor.stride()[:3]
    sizes = {"batch": 2, "nheads": 6, "group_size": 2, "seqlen_q": 200, "seqlen_k": 333, "q_offset": 133}
    assert {name: found[name] for name in sizes} == sizes
    assert found["stride_alibi_b"] == 6
    assert "lse_rows" not in found, "a backward kernel always has an LSE"


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 6, 200, 333), (6 * 200 * 333, 200 * 333, 333)),
        ((1, 6, 200, 333), (0, 200 * 333, 333)),
        ((2, 1, 200, 333), (200 * 333, 0, 333)),
        ((1, 1, 200, 333), (0, 0, 333)),
        ((1, 1, 1, 333), (0, 0, 0)),
    ],
)
def test_the_gradient_of_a_bias_lies_in_the_shape_of_the_bias(
    shape: tuple[int, ...], strides: tuple[int, int, int]
) -> None:
    found = scalars(backward_geometry(backward_tensors()._replace(dbias=torch.empty(shape))))
    assert tuple(found[f"stride_dbias_{axis}"] for axis in "bhq") == strides
    assert (found["bias_batch"], found["bias_heads"]) == shape[:2]


def test_the_gradient_of_a_bias_by_keys_has_a_row_for_every_head() -> None:
    geometry = backward_geometry(backward_tensors()._replace(dbias=torch.empty(2, 6, 333)))
    assert geometry.dbias_shape is None
    found = scalars(geometry)
    assert tuple(found[f"stride_dbias_{axis}"] for axis in "bhq") == (6 * 333, 333, 0)


@pytest.mark.parametrize("field", ["dout", "dq", "dk", "dv"])
def test_a_gradient_of_another_shape_is_refused(field: str) -> None:
    given = backward_tensors()
    wrong = getattr(given, field)[..., :-1, :]
    with pytest.raises(LaunchError, match=rf"shape of its tensor, {field} \(2, ., \d+, 64\), got \(2, ., \d+, 64\)"):
        backward_geometry(given._replace(**{field: wrong}))


@pytest.mark.parametrize("field", ["lse", "dlse", "dbias"])
def test_tensors_without_strides_are_contiguous(field: str) -> None:
    wrong = torch.empty(2, 6, 400)[..., ::2]
    with pytest.raises(
        LaunchError, match=rf"{field} is contiguous, got shape \(2, 6, 200\) and strides \(2400, 400, 2"
    ):
        backward_geometry(backward_tensors()._replace(**{field: wrong}))


@pytest.mark.parametrize("axis", range(5))
def test_nothing_to_compute_is_seen_of_either_direction(axis: int) -> None:
    for size in (1, 0):
        shape = tuple(size if i == axis else n for i, n in enumerate(SHAPE))
        if axis == 2 and not size:
            continue  # heads are never without keys
        geometry = backward_geometry(backward_tensors(shape=shape))  # type: ignore[arg-type]
        assert geometry.is_empty is (size == 0)
