"""Plans of later sizes, from what the first one has found: they launch what a plan of their own would."""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.families import family
from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch.backward import backward_geometry
from flashgen.launch.driver_plan import DriverPlan
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout
from flashgen.launch.plan import EmptyPlan, OpenPlan, make_plan
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import (
    BACKWARD_DESCRIPTORS,
    BACKWARD_POINTERS,
    DESCRIPTORS,
    LSE,
    POINTERS,
    SPLIT,
    Both,
    Imagined,
    backward_tensors,
)
from tests.launch.kernels import KERNELS, kernel, tensors
from tests.tiers import first

SHAPES = ((2, 6, 3, 200, 333), (1, 4, 4, 1, 64), (3, 8, 1, 77, 78), (2, 6, 3, 200, 334))
ORDER = (0, 1, 2, 0, 3, 2, 1)
"""Every plan is launched again after others were made and launched."""

FORWARD = (*LSE, "seqlen_q: i32", "stride_qs: i64", "softmax_scale: fp32", "q_offset: i32")
KINDS = {
    "forward": ("fwd-bf16-d64-causal", ((*POINTERS, *FORWARD),), {}),
    "forward descriptors": ("fwd-bf16-d64-causal", ((*DESCRIPTORS, *FORWARD),), {}),
    "pointers and descriptors": ("fwd-bf16-d64-causal", ((*DESCRIPTORS, *FORWARD), (*POINTERS, *FORWARD)), {}),
    "split forward": (
        "fwd-bf16-d64",
        ((*DESCRIPTORS, "PartialOut: *fp32"), ("PartialOut: *fp32", *LSE)),
        {"config": SPLIT},
    ),
    "backward": ("bwd-bf16-d64", BACKWARD_POINTERS, {}),
    "backward descriptors": ("bwd-bf16-d64", BACKWARD_DESCRIPTORS, {}),
}


@pytest.mark.parametrize("name", first(5, KERNELS))
def test_a_later_geometry_is_launched_as_by_a_plan_of_its_own(name: str, cuda: FakeDriver) -> None:
    spec, config, compiled = kernel(name)
    cuda.parameters = family(config.family).parameters(spec, config)
    calls = [tensors(spec, shape, bshd=number == 2) for number, shape in enumerate(SHAPES)]
    open_plan = OpenPlan(compiled, spec, config, 0)
    later = {number: open_plan.sized(Geometry.of(*calls[number])) for number in ORDER}
    own = [make_plan(compiled, spec, config, Geometry.of(*call), 0) for call in calls]
    for turn, number in enumerate(ORDER):
        four, rows = calls[number], torch.empty(calls[number][0].shape[:3])
        offset = torch.zeros(four[0].shape[0], dtype=torch.int32) if spec.offset_tensor else None
        for launch in (later[number], own[number]):
            launch(*four, rows if turn % 2 else None, None if turn % 3 else 0.3, offset)
        found, expected = cuda.launches[-2:]
        if not turn % 2:
            found.values.pop("LSE"), expected.values.pop("LSE")  # whatever the last call had
        assert found == expected
    with_descriptors = config["loads"] == "descriptor"
    assert len(cuda.encoded) == (2 * 4 * len(SHAPES) if with_descriptors else 0)


@pytest.mark.parametrize("name", KINDS)
def test_kernels_of_either_direction_get_the_same_through_triton(name: str, cuda: FakeDriver) -> None:
    key, named, options = KINDS[name]
    kernel = Imagined(*named, key=key, **options)  # type: ignore[arg-type]
    first, *others = SHAPES
    for shape in others:
        if kernel.spec.direction == "forward":
            four = tensors(kernel.spec, shape)
            Both(kernel, cuda, Geometry.of(*four), Geometry.of(*tensors(kernel.spec, first)))(*four)
        else:
            made, given = (backward_tensors(key, each, bshd=True) for each in (first, shape))
            Both(kernel, cuda, backward_geometry(given), backward_geometry(made))(given)


def test_a_geometry_of_another_kind_asks_for_a_plan_of_its_own(cuda: FakeDriver) -> None:
    kernel = Imagined((*POINTERS, "seqlen_k: i32"))
    layouts = [Layout(parameters=each, trailing=2) for each in kernel.given]
    four = tensors(kernel.spec)
    plan = DriverPlan(kernel.binding(Geometry.of(*four)), functions=[1], layouts=layouts, device_index=0)
    assert plan.sized(Geometry.of(*tensors(kernel.spec, SHAPES[1]))) is not None
    with_bias = Features(bias=torch.zeros(2, 6, 200, 333, dtype=torch.bfloat16))
    assert plan.sized(Geometry.of(*four, with_bias)) is None


def test_kernels_of_other_head_dims_are_refused(cuda: FakeDriver) -> None:
    """TMA fills narrower tensors with zeros, so they would run, at the scale of theirs."""
    spec, config, compiled = kernel("pointers")
    open_plan = OpenPlan(compiled, spec, config, 0)
    q, k, v, out = tensors(spec)
    narrow_q, narrow_k, narrow_v, narrow_out = (one[..., : one.shape[-1] // 2].contiguous() for one in (q, k, v, out))
    for four in ((narrow_q, narrow_k, v, out), (q, k, narrow_v, narrow_out)):
        with pytest.raises(LaunchError, match=r"kernels are for head_dim and head_dim_v \("):
            open_plan.sized(Geometry.of(*four))


def test_an_empty_call_needs_no_kernel(cuda: FakeDriver) -> None:
    spec, config, compiled = kernel("pointers")
    open_plan = OpenPlan(compiled, spec, config, 0)
    assert isinstance(open_plan.sized(Geometry.of(*tensors(spec, (2, 6, 3, 0, 333)))), EmptyPlan)
    assert cuda.loaded == []
