"""Kernels with features and kernels in Gluon, compiled: what a launch prepares is what their PTX declares and reads."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from flashgen.codegen import families
from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import LaunchError
from flashgen.core.features.positions import MAX_OFFSET
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import counters
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import ptx_sizes, slot_sizes, trailing_pointers
from flashgen.launch.plan import known_layout, make_plan
from flashgen.launch.triton_plan import TritonPlan
from scripts.crosscompile_jobs import ONE_WARPGROUP
from tests.fakes.driver import FakeDriver
from tests.launch.kernels import tensors
from tests.tiers import EXHAUSTIVE, only

EVERYTHING = "fwd-bf16-d48-causal-softcap-alibi-sink-bias-mask-window-bias_fp32-sink_bf16"
SMALL = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
# specialization, family, device, knobs that differ from the default
KERNELS = {
    "features, descriptors": (EVERYTHING, PORTABLE_FORWARD, "h200", {**SMALL, "loads": "descriptor"}),
    "features, pointers": (EVERYTHING, PORTABLE_FORWARD, "a100", {**SMALL, "loads": "pointer"}),
    "two parts, descriptors": (
        "fwd-bf16-d96-alibi",
        PORTABLE_FORWARD,
        "h200",
        {"loads": "descriptor", "split_d": True},
    ),
    "gluon, and a pointer to O": ("fwd-bf16-d128-causal", HOPPER_FORWARD, "h200", {}),
    "gluon, descriptors alone": ("fwd-bf16-d128", HOPPER_FORWARD, "h200", {}),
    "gluon, packed heads": (
        "fwd-bf16-d128-causal-alibi-sink-window",  # compiled by tests/codegen too, as are the others in Gluon
        HOPPER_FORWARD,
        "h200",
        {"packed_heads": 4, "masked_blocks": "branch", **ONE_WARPGROUP},
    ),
    "gluon, two parts, tiles of scores": (
        "fwd-bf16-d96-bias-mask-bias_fp32",
        HOPPER_FORWARD,
        "h200",
        {"split_d": True, **ONE_WARPGROUP},
    ),
}


# both tests of a kernel by one process, which compiles it once
each_kernel = pytest.mark.parametrize(
    "name",
    only(
        [pytest.param(each, marks=pytest.mark.xdist_group(f"kernel: {each}")) for each in KERNELS],
        "features, descriptors",
        "gluon, and a pointer to O",
        "gluon, packed heads",
    ),
)


@functools.cache
def kernel(name: str) -> tuple[Specialization, Config, CompiledKernel]:
    key, row, target, changes = KERNELS[name]
    spec, device = Specialization.parse(key), find_device(target)
    config = row.default(spec, device).replace(**changes)
    return spec, config, compile_kernel(spec, config, device)


@pytest.fixture(autouse=True)
def counters_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_FREE", {})
    monkeypatch.setattr(counters, "zeros", lambda index, count: torch.zeros(count, dtype=torch.int32))


@each_kernel
def test_the_layout_is_that_of_the_compiled_kernel(name: str) -> None:
    spec, config, compiled = kernel(name)
    parameters = families.family(config.family).parameters(spec, config)
    ptx = compiled.handle.asm["ptx"]
    assert trailing_pointers(ptx_sizes(ptx), parameters) == 2
    assert ptx_sizes(ptx)[:-2] == tuple(size for parameter in parameters for size in slot_sizes(parameter))
    threads = int(ptx.split(".reqntid")[1].split()[0])
    assert threads == compiled.handle.metadata.num_warps * 32, "the threads of a launch are those that were compiled"


@each_kernel
def test_every_parameter_has_the_value_of_the_call(name: str, cuda: FakeDriver) -> None:
    spec, config, compiled = kernel(name)
    q, k, v, out = tensors(spec)
    features = Features(
        window=(70, None),
        softcap=30.0,
        alibi_slopes=torch.ones(2, 6),
        sinks=torch.zeros(6, dtype=torch.bfloat16),
        bias=torch.zeros(2, 1, 200, 336)[..., :333],
        mask=torch.ones(1, 6, 200, 336, dtype=torch.bool)[..., :333],
    )
    cuda.parameters = families.family(config.family).parameters(spec, config)
    launch = make_plan(compiled, spec, config, Geometry.of(q, k, v, out, features), 0)
    assert not isinstance(launch, TritonPlan)
    launch(q, k, v, out, None, 0.25, None, features)
    (done,) = cuda.launches
    values = done.values
    assert done.block == (compiled.handle.metadata.num_warps * 32, 1, 1)
    expected = {
        "window_left": 70,
        "window_right": 0 if spec.causal else MAX_OFFSET + 533,
        "AlibiSlopes": features.alibi_slopes.data_ptr(),  # type: ignore[union-attr]
        "stride_alibi_b": 6,
        "Sinks": features.sinks.data_ptr(),  # type: ignore[union-attr]
        "Bias": features.bias.data_ptr(),  # type: ignore[union-attr]
        "Mask": features.mask.data_ptr(),  # type: ignore[union-attr]
        **dict(zip([f"stride_bias_{axis}" for axis in "bhqk"], (200 * 336, 0, 336, 1), strict=True)),
        **dict(zip([f"stride_mask_{axis}" for axis in "bhqk"], (0, 200 * 336, 336, 1), strict=True)),
        "batch": 2,
        "q_offset": 133,
        "seqlen_q": 200,
        "seqlen_k": 333,
    }
    assert {key: values[key] for key in expected if key in values} == {
        key: value for key, value in expected.items() if key in values
    }
    if "softcap_rate" in values:
        assert values["softcap_rate"] == pytest.approx(2 * math.log2(math.e) * 0.25 / 30)
        assert values["softcap_scale_log2"] == pytest.approx(2 * math.log2(math.e) * 30)
    for letter, tensor in zip("qkvo", (q, k, v, out), strict=True):
        for key in (letter.upper(), f"{letter}_desc", f"{letter}1_desc"):
            assert values.get(key, tensor.data_ptr()) == tensor.data_ptr()
    strides = {f"stride_o{axis}": stride for axis, stride in zip("bhs", out.stride(), strict=False)}
    assert {key: values.get(key, stride) for key, stride in strides.items()} == strides
    if "split_d" in KERNELS[name][3]:
        widths = [values[f"k{part}_desc.encoded"].box[0] for part in ("", "1")]
        assert widths == [64, 32], "64 and 32 of 96"
    if "packed_heads" in KERNELS[name][3]:
        for letter in "qo":
            encoded = values[f"{letter}_desc.encoded"]
            assert (encoded.shape, encoded.box[1:]) == ((128, 200, 2, 3, 2), (16, 4, 1, 1))
            assert encoded.byte_strides == (256, 256 * 200, 2 * 256 * 200, 6 * 256 * 200)
    for tensor, shape in (("bias", (333, 200, 1, 2)), ("mask", (333, 200, 6, 1))):
        if f"{tensor}_desc" in values:
            assert values[f"{tensor}_desc"] == values[tensor.capitalize()]
            assert values[f"{tensor}_desc.encoded"].shape == shape, "what heads or batches share is there once"
    if "Counter" in values:
        assert values["Counter"] != 0


@EXHAUSTIVE
def test_descriptors_of_scores_follow_the_tensors_of_each_call(cuda: FakeDriver) -> None:
    spec, config, compiled = kernel("gluon, two parts, tiles of scores")
    q, k, v, out = tensors(spec)
    calls = [
        Features(bias=torch.zeros(6, 200, 336)[None, ..., :333], mask=torch.ones(1, 1, 200, 336).bool()[..., :333])
        for _ in range(2)
    ]
    cuda.parameters = families.family(config.family).parameters(spec, config)
    launch = make_plan(compiled, spec, config, Geometry.of(q, k, v, out, calls[0]), 0)
    for features in (*calls, calls[0]):
        launch(q, k, v, out, features=features)
        values = cuda.launches[-1].values
        assert (values["bias_desc"], values["mask_desc"]) == (features.bias.data_ptr(), features.mask.data_ptr())  # type: ignore[union-attr]
    with pytest.raises(LaunchError, match="reads Bias"):
        make_plan(compiled, spec, config, Geometry.of(q, k, v, out), 0)


SERVING = {
    "decoding over pages": ("dec-bf16-d64-page16-sink", "portable_decode"),
    "decoding by warpgroups": ("dec-bf16-d64-page16-sink", "hopper_decode"),
    "packed sequences over pages": ("fwd-bf16-d64-causal-varlen-page16", "portable_forward"),
    "packed sequences": ("fwd-bf16-d128-causal-varlen", "hopper_forward"),
    "their gradients": ("bwd-bf16-d64-varlen", "portable_backward_fused"),
}
"""Of which calls have kernels that nobody has compiled, in tests/runtime."""


@pytest.mark.parametrize("name", only(SERVING, "decoding over pages", "packed sequences over pages", "their gradients"))
def test_kernels_of_serving_have_the_parameters_that_their_rows_say(name: str) -> None:
    key, family_id = SERVING[name]
    spec, device = Specialization.parse(key), find_device("h200")
    config = families.family(family_id).default(spec, device)
    if family_id == "hopper_forward":
        config = config.replace(**ONE_WARPGROUP)
    assert families.invalid(config, spec, device) is None
    for part in compile_kernel(spec, config, device).parts:
        ptx, parameters = part.handle.asm["ptx"], part.kernel.parameters
        assert trailing_pointers(ptx_sizes(ptx), parameters) == 2
        assert known_layout(part) is not None
        assert ptx_sizes(ptx)[:-2] == tuple(size for parameter in parameters for size in slot_sizes(parameter))
        assert part.num_warps == part.handle.metadata.num_warps
