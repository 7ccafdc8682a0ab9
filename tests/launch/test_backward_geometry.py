"""Shapes and strides of a backward call: gradients beside their tensors, what is aligned, where a bias broadcasts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch.backward_geometry import BackwardGeometry, backward_aligned16, backward_scalars
from flashgen.launch.geometry import Geometry
from tests.launch.backward_rows import NAMES, SHAPE, backward_tensors, replaced


def test_every_tensor_has_its_shape_and_its_own_strides() -> None:
    given = backward_tensors("bwd-bf16-d192-dv128", bshd=True)
    features = Features(alibi_slopes=torch.ones(2, 6))
    geometry = BackwardGeometry.of(given, features)
    assert geometry.forward == Geometry.of(given.q, given.k, given.v, given.out, features)
    found = backward_scalars(geometry)
    for name, field in NAMES.items():
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
    found = backward_scalars(BackwardGeometry.of(replaced(backward_tensors(), dbias=torch.empty(shape))))
    assert tuple(found[f"stride_dbias_{axis}"] for axis in "bhq") == strides
    assert (found["bias_batch"], found["bias_heads"]) == shape[:2]


def test_the_gradient_of_a_bias_by_keys_has_a_row_for_every_head() -> None:
    geometry = BackwardGeometry.of(replaced(backward_tensors(), dbias=torch.empty(2, 6, 333)))
    assert geometry.dbias_shape is None
    found = backward_scalars(geometry)
    assert tuple(found[f"stride_dbias_{axis}"] for axis in "bhq") == (6 * 333, 333, 0)


@pytest.mark.parametrize("field", ["dout", "dq", "dk", "dv"])
def test_a_gradient_of_another_shape_is_refused(field: str) -> None:
    given = backward_tensors()
    wrong = getattr(given, field)[..., :-1, :]
    with pytest.raises(LaunchError, match=rf"shape of its tensor, {field} \(2, ., \d+, 64\), got \(2, ., \d+, 64\)"):
        BackwardGeometry.of(replaced(given, **{field: wrong}))


@pytest.mark.parametrize("field", ["lse", "dlse", "dbias"])
def test_tensors_without_strides_are_contiguous(field: str) -> None:
    wrong = torch.empty(2, 6, 400)[..., ::2]
    with pytest.raises(
        LaunchError, match=rf"{field} is contiguous, got shape \(2, 6, 200\) and strides \(2400, 400, 2"
    ):
        BackwardGeometry.of(replaced(backward_tensors(), **{field: wrong}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_one_odd_stride_of_any_tensor_is_not_aligned(name: str, axis: int, element_bytes: int) -> None:
    geometry = BackwardGeometry.of(backward_tensors())
    assert backward_aligned16(geometry, 0x1000, element_bytes)
    assert not backward_aligned16(geometry, 0x1000 | 0x2008, element_bytes)
    strides = geometry.tensor(name)[1]
    for step, fits in ((16 // element_bytes, True), (16 // element_bytes - 1, False)):
        moved = {f"{name}_strides": tuple(s + step * (i == axis) for i, s in enumerate(strides))}
        if name in "qkvo":
            changed = replace(geometry, forward=replace(geometry.forward, **moved))
        else:
            changed = replace(geometry, **moved)  # type: ignore[arg-type]
        assert backward_aligned16(changed, 0x1000, element_bytes) is fits


def test_a_dimension_of_size_one_may_have_any_stride() -> None:
    given = backward_tensors(shape=(1, 1, 1, 1, 9))
    odd = given.dq.as_strided(given.dq.shape, (1, 3, 5, 1))
    assert backward_aligned16(BackwardGeometry.of(replaced(given, dq=odd)), 0x1000, 2)


@pytest.mark.parametrize("axis", range(5))
def test_nothing_to_compute_is_seen(axis: int) -> None:
    for size in (1, 0):
        shape = tuple(size if i == axis else n for i, n in enumerate(SHAPE))
        if axis == 2 and not size:
            continue  # heads are never without keys
        geometry = BackwardGeometry.of(backward_tensors(shape=shape))  # type: ignore[arg-type]
        assert geometry.is_empty is (size == 0)
