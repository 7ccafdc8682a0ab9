"""What the parameters of features are bound to, through the driver and through Triton alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.positions import MAX_OFFSET, clamp_window
from flashgen.core.features.values import BlockMask, Features
from flashgen.launch.feature_arguments import SIZES
from flashgen.launch.geometry import Geometry, scalars
from flashgen.launch.plan import EmptyPlan, make_plan
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import DESCRIPTORS, LSE, POINTERS, Both, Imagined
from tests.launch.kernels import tensors
from tests.toy import declare_toy

SHAPE = (2, 6, 3, 200, 333)
LOG2E = math.log2(math.e)
REACH = MAX_OFFSET + 533
STRIDES = [f"stride_{name}_{axis}: i64" for name in ("bias", "mask") for axis in "bhqk"]
BLOCKS = [f"{name}: *i32" for name in ("PartialCounts", "PartialIndices", "FullCounts", "FullIndices")]


class Launched(Both):
    """One forward kernel, launched both ways."""

    def __call__(self, *arguments: Any) -> dict[str, Any]:  # type: ignore[override]
        (values,) = super().__call__(*arguments)
        return values


@pytest.fixture
def both(cuda: FakeDriver) -> Callable[..., Launched]:
    def make(*named: str, key: str = "fwd-bf16-d64", features: Features | None = None) -> Launched:
        kernel = Imagined((*named, *POINTERS, *LSE), key=key)
        return Launched(kernel, cuda, Geometry.of(*tensors(kernel.spec, SHAPE), features))

    return make


def four() -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.empty(2, h, s, 64, dtype=torch.bfloat16) for h, s in ((6, 200), (3, 333), (3, 333)))
    return q, k, v, torch.empty_like(q)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_may_change_at_every_call(causal: bool, both: Callable[..., Launched]) -> None:
    launch = both("window_left: i32", "window_right: i32", key="fwd-bf16-d64" + "-causal" * causal + "-window")
    given = four()
    cases: list[tuple[tuple[int | None, int | None], tuple[int, int]]] = [
        ((128, 0), (128, 0)),
        ((0, 5), (0, 5)),
        ((None, 7), (REACH, 7)),
        ((3, None), (3, REACH)),
        ((1 << 40, 1 << 50), (REACH, REACH)),
        ((128, 0), (128, 0)),
    ]
    for window, (left, right) in cases:
        values = launch(*given, None, None, None, Features(window=window))
        assert (values["window_left"], values["window_right"]) == (left, 0 if causal else right)


def test_clamped_windows_and_offsets_keep_every_sum_within_32_bits() -> None:
    length = 1 << 26
    left, right = clamp_window((None, None), length, length)
    assert MAX_OFFSET + length + left + right < 1 << 31
    assert left >= MAX_OFFSET + length, "unlimited stays unlimited under the largest offset"


def test_only_with_a_window_or_slopes_does_an_offset_beyond_the_lengths_matter(both: Callable[..., Launched]) -> None:
    given, slopes = four(), torch.ones(6)
    for named, features, expected in (
        (["q_offset: i32"], None, (333, -200)),
        (["q_offset: i32", "window_left: i32"], Features(window=(5, None)), (MAX_OFFSET, -MAX_OFFSET)),
        (["q_offset: i32", "AlibiSlopes: *fp32"], Features(alibi_slopes=slopes), (MAX_OFFSET, -MAX_OFFSET)),
    ):
        launch = both(*named)
        offsets = [launch(*given, None, None, offset, features)["q_offset"] for offset in (1 << 40, -(1 << 40))]
        assert tuple(offsets) == expected
        assert launch(*given, None, None, 400, features)["q_offset"] == (400 if features else 333)


def test_softcap_factors_follow_the_cap_and_the_scale(both: Callable[..., Launched]) -> None:
    launch = both("softcap_rate: fp32", "softcap_scale_log2: fp32")
    given = four()
    for cap, scale in ((30.0, None), (30.0, 0.5), (50.0, 0.5), (50.0, None), (30.0, None)):
        values = launch(*given, None, scale, None, Features(softcap=cap))
        x = 12.5  # a score before the scale
        capped = cap * math.tanh((scale or 64**-0.5) * x / cap) * LOG2E
        mine = values["softcap_scale_log2"] * (0.5 - 1 / (2 ** (x * values["softcap_rate"]) + 1))
        assert mine == pytest.approx(capped, rel=1e-6)
    for cap, scale in ((1e-40, None), (5e-324, 2.0**126), (2.0**125, 2.0**-149)):
        values = launch(*given, None, scale, None, Features(softcap=cap))
        rate, doubled = (torch.tensor(values[name]) for name in ("softcap_rate", "softcap_scale_log2"))
        assert torch.isfinite(rate)
        assert torch.isfinite(doubled)
    with pytest.raises(LaunchError, match=r"softcap is launched with one above 0, got 0\.0"):
        launch(*given)


def test_tensors_of_features_are_found_by_name(both: Callable[..., Launched]) -> None:
    bias = torch.empty(2, 1, 200, 333)
    mask = torch.empty(1, 6, 1, 333, dtype=torch.bool)
    slopes, sinks, aux = torch.empty(2, 6), torch.empty(6), (torch.empty(3), torch.empty(4))
    features = Features(bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks, aux=aux)
    names = ["Bias: *fp32", "Mask: *u8", "AlibiSlopes: *fp32", "Sinks: *fp32", "Aux0: *fp32", "Aux1: *fp32"]
    launch = both(*names, *STRIDES, "stride_alibi_b: i32", "batch: i32", features=features)
    values = launch(*four(), None, None, None, features)
    pointers = {"Bias": bias, "Mask": mask, "AlibiSlopes": slopes, "Sinks": sinks, "Aux0": aux[0], "Aux1": aux[1]}
    assert {name: values[name] for name in pointers} == {name: one.data_ptr() for name, one in pointers.items()}
    assert [values[f"stride_bias_{axis}"] for axis in "bhqk"] == [200 * 333, 0, 333, 1]
    assert [values[f"stride_mask_{axis}"] for axis in "bhqk"] == [0, 333, 0, 1]
    assert (values["stride_alibi_b"], values["batch"]) == (6, 2)
    other = dataclasses.replace(features, bias=torch.empty_like(bias), aux=aux[::-1])
    values = launch(*four(), None, None, None, other)
    assert (values["Bias"], values["Aux0"]) == (other.bias.data_ptr(), aux[1].data_ptr())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["AlibiSlopes", "Sinks", "Bias", "Mask", "Aux0", "Aux11", "FullCounts"])
def test_a_tensor_that_the_kernel_needs_and_the_call_lacks_is_named(name: str, both: Callable[..., Launched]) -> None:
    launch = both(f"{name}: *fp32")
    for features in (None, Features(window=(1, 1))):
        for plan in launch.plans:
            with pytest.raises(LaunchError, match=f"the kernel reads {name}, and the features of the call have none"):
                plan(*four(), None, None, None, features)
    assert launch.cuda.launches == []


@pytest.mark.parametrize(
    ("sizes", "strides"), [((1, 1), (0, 0)), ((2, 1), (2, 0)), ((1, 6), (0, 2)), ((2, 6), (12, 2))]
)
def test_a_block_mask_is_walked_in_rows_of_query_blocks(
    sizes: tuple[int, int], strides: tuple[int, int], both: Callable[..., Launched]
) -> None:
    counts = [torch.empty(*sizes, 2, dtype=torch.int32) for _ in range(2)]
    indices = [torch.empty(*sizes, 2, 3, dtype=torch.int32) for _ in range(2)]
    block_mask = BlockMask(
        partial_counts=counts[0],
        partial_indices=indices[0],
        full_counts=counts[1],
        full_indices=indices[1],
        seqlen_q=200,
        seqlen_k=333,
    )
    features = Features(block_mask=block_mask)
    more = ["stride_block_b: i32", "stride_block_h: i32", "num_q_blocks: i32", "num_k_blocks: i32"]
    values = both(*BLOCKS, *more, features=features)(*four(), None, None, None, features)
    assert (values["stride_block_b"], values["stride_block_h"]) == strides
    assert (values["num_q_blocks"], values["num_k_blocks"]) == (2, 3)
    found = [values[name.split(":")[0]] for name in BLOCKS]
    assert found == [t.data_ptr() for t in (counts[0], indices[0], counts[1], indices[1])]


def test_a_kernel_without_features_takes_any_features(both: Callable[..., Launched]) -> None:
    launch = both("nheads: i32")
    plain, featured = launch(*four()), launch(*four(), None, None, None, Features(softcap=3.0, window=(1, 2)))
    assert plain.keys() == featured.keys()


@pytest.mark.parametrize("letter", "qkvo")
def test_every_descriptor_of_a_tensor_follows_its_pointer(letter: str, cuda: FakeDriver) -> None:
    """A head_dim in two parts: two boxes over the same tensor, side by side in the signature or not."""
    second = f"{letter}1_desc: tensordesc<bf16[1, 1, 64, 32],NVMMASharedLayout(a=128, b=16, c=4)>"
    kernel = Imagined((*DESCRIPTORS, second, *LSE), key="fwd-bf16-d96")
    first, other = tensors(kernel.spec, SHAPE), tensors(kernel.spec, SHAPE)
    launch = kernel.through_the_driver(cuda, Geometry.of(*first))
    for given in (first, other, first):
        launch(*given)
        values = cuda.launches[-1].values
        assert [values[f"{name}_desc"] for name in "qkvo"] == [tensor.data_ptr() for tensor in given]
        assert values[f"{letter}1_desc"] == values[f"{letter}_desc"]
        assert values[f"{letter}1_desc.encoded"].box == (64, 68, 1, 1)
        assert values[f"{letter}_desc.encoded"].box == (64, 64 + "qkvo".index(letter), 1, 1)
    assert cuda.launches[-1].block == (12 * 32, 1, 1)
    bad = tensors(kernel.spec, SHAPE)
    at = "qkvo".index(letter)
    cuda.refused = {bad[at].data_ptr()}
    with pytest.raises(LaunchError, match="describe a tensor"):
        launch(*(bad[i] if i == at else first[i] for i in range(4)))
    launch(*first)
    assert cuda.launches[-1].values[f"{letter}1_desc"] == first[at].data_ptr()
    kernel.through_triton(Geometry.of(*first))(*first)
    assert kernel.seen[-1].arguments[f"{letter}1_desc"].base is first[at]
    assert kernel.seen[-1].arguments[f"{letter}1_desc"].block_shape == [1, 1, 64, 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_keys_the_lse_is_that_of_the_sinks(dtype: torch.dtype) -> None:
    q, out, lse = torch.empty(2, 3, 5, 8), torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5)
    sinks = torch.tensor([0.5, -2.0, 3.0], dtype=dtype)
    k = torch.empty(2, 3, 0, 8)
    EmptyPlan()(q, k, k, out, lse, None, None, Features(sinks=sinks))
    assert torch.all(out == 0)
    assert torch.equal(lse, sinks.float().view(1, 3, 1).expand(2, 3, 5))
    EmptyPlan()(q, k, k, out, lse, None, None, Features(window=(1, 1)))
    assert torch.all(lse == -math.inf)


def test_the_geometry_has_the_sizes_of_every_feature() -> None:
    geometry = Geometry.of(*tensors(Imagined(()).spec, SHAPE))
    assert scalars(geometry).keys() >= SIZES


@pytest.mark.parametrize("name", ["Toys: *fp32", "toys: i32", "stride_toys_b: i64"])
def test_a_parameter_of_a_feature_that_no_launch_writes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_toy(monkeypatch)
    kernel = Imagined((*POINTERS, *LSE, name))
    geometry = Geometry.of(*tensors(kernel.spec, SHAPE))
    with pytest.raises(LaunchError, match=f"got {name.split(':', maxsplit=1)[0]} "):
        make_plan(kernel.compiled, kernel.spec, kernel.config, geometry, 0)
