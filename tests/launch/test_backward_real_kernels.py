"""Kernels of every backward family, compiled: what a launch prepares is what their PTX declares and reads."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.families import FAMILIES, family, invalid
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.core.features.positions import MAX_OFFSET
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import counters, driver
from flashgen.launch.backward import FIELDS, BackwardTensors, backward_geometry
from flashgen.launch.parameters import ptx_sizes, slot_sizes
from flashgen.launch.plan import known_layout, make_backward_plan
from flashgen.launch.triton_plan import TritonPlan
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import backward_tensors, calls_of
from tests.tiers import only

FEATURES = "causal-softcap-alibi-bias-mask-window-bias_fp32-dbias"
SMALL: dict[str, KnobValue] = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
SMALL_DQ: dict[str, KnobValue] = {"dq_block_m": 32, "dq_block_n": 32, "dq_num_warps": 4, "dq_num_stages": 2}
# by family: specialization, knobs that differ from the default (small blocks compile in half the time, and the kernels
# for Hopper are those that tests/codegen has compiled)
CASES: dict[str, tuple[str, dict[str, KnobValue]]] = {
    "hopper_backward_fused": ("bwd-bf16-d128-causal", {}),
    "hopper_backward_split": ("bwd-fp16-d256-causal-offset", {}),
    "portable_backward_fused": (f"bwd-bf16-d96-{FEATURES}", {**SMALL, "loads": "descriptor", "split_d": True}),
    "portable_backward_split": (f"bwd-bf16-d64-{FEATURES}", {**SMALL, **SMALL_DQ, "loads": "pointer"}),
}
LOG2E = math.log2(math.e)


# both tests of a kernel by one process, which compiles it once
each_family = pytest.mark.parametrize(
    "family_id",
    only(
        [pytest.param(each, marks=pytest.mark.xdist_group(f"kernel: {each}")) for each in CASES],
        "hopper_backward_fused",
    ),
)


@functools.cache
def compiled_case(family_id: str) -> tuple[Specialization, Config, CompiledKernel]:
    key, changes = CASES[family_id]
    spec, device = Specialization.parse(key), find_device("h200")
    config = family(family_id).default(spec, device).replace(**changes)
    assert invalid(config, spec, device) is None
    return spec, config, compile_kernel(spec, config, device)


@pytest.fixture(autouse=True)
def counters_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_FREE", {})
    monkeypatch.setattr(counters, "zeros", lambda index, count: torch.zeros(count, dtype=torch.int32))


def call_of(spec: Specialization) -> tuple[BackwardTensors, Features]:
    given = backward_tensors(spec.key, bshd=True, dlse=True)
    if not spec.bias:
        return given, Features()
    features = Features(
        window=(70, None),
        softcap=30.0,
        alibi_slopes=torch.ones(2, 6),
        bias=torch.zeros(2, 1, 200, 336)[..., :333],
        mask=torch.ones(1, 6, 200, 336, dtype=torch.bool)[..., :333],
    )
    return given._replace(dbias=torch.empty(2, 1, 200, 333)), features


def expected_arguments(given: BackwardTensors, features: Features) -> dict[str, Any]:
    """The whole launch vocabulary but scratch memory, for these tensors and a scale of 0.25."""
    found: dict[str, Any] = {"batch": 2, "nheads": 6, "group_size": 2, "seqlen_q": 200, "seqlen_k": 333}
    for name, field in FIELDS.items():
        tensor = getattr(given, field)
        found |= {
            name.upper(): tensor.data_ptr(),
            f"{name}_desc": tensor.data_ptr(),
            f"{name}1_desc": tensor.data_ptr(),
        }
        found |= zip((f"stride_{name}{axis}" for axis in "bhs"), tensor.stride(), strict=False)
    found |= {"LSE": given.lse.data_ptr(), "DLSE": given.dlse.data_ptr(), "dlse_rows": 200}  # type: ignore[union-attr]
    found |= {"softmax_scale": 0.25, "softmax_scale_log2": 0.25 * LOG2E, "q_offset": 133}
    if features.bias is None:
        return found
    found |= {"softcap_rate": 2 * LOG2E * 0.25 / 30, "softcap_scale_log2": 2 * LOG2E * 30}
    found |= {"window_left": 70, "window_right": MAX_OFFSET + 533, "stride_alibi_b": 6}
    features = {
        "AlibiSlopes": features.alibi_slopes,
        "Bias": features.bias,
        "Mask": features.mask,
        "DBias": given.dbias,
    }
    found |= {name: tensor.data_ptr() for name, tensor in features.items()}  # type: ignore[union-attr]
    found |= zip((f"stride_bias_{axis}" for axis in "bhqk"), (200 * 336, 0, 336, 1), strict=True)
    found |= zip((f"stride_mask_{axis}" for axis in "bhqk"), (0, 200 * 336, 336, 1), strict=True)
    found |= {"stride_dbias_b": 200 * 333, "stride_dbias_h": 0, "stride_dbias_q": 333}
    return found | {"bias_batch": 2, "bias_heads": 1}


@each_family
def test_the_layout_is_that_of_the_compiled_kernels(family_id: str) -> None:
    _, _, compiled = compiled_case(family_id)
    for part in compiled.parts:
        ptx, parameters = part.handle.asm["ptx"], part.kernel.parameters
        assert known_layout(part) is not None, part.kernel.entry
        assert ptx_sizes(ptx)[:-2] == tuple(size for parameter in parameters for size in slot_sizes(parameter))
        threads = int(ptx.split(".reqntid")[1].split()[0])
        assert threads == part.handle.metadata.num_warps * 32, "the threads of a launch are those that were compiled"


@each_family
def test_every_parameter_of_every_kernel_has_the_value_of_the_call(family_id: str, cuda: FakeDriver) -> None:
    spec, config, compiled = compiled_case(family_id)
    given, features = call_of(spec)
    geometry = backward_geometry(given, features)
    cuda.named = {part.kernel.entry: part.kernel.parameters for part in compiled.parts}
    launch = make_backward_plan(compiled, spec, config, geometry, 0)
    assert not isinstance(launch, TritonPlan)
    offsets = torch.full((2,), 133, dtype=torch.int32) if spec.offset_tensor else None
    neg_delta = launch(given, 0.25, offsets, features)
    (call,) = calls_of(cuda, len(compiled.parts))
    expected, start = expected_arguments(given, features), neg_delta.data_ptr()
    if offsets is not None:
        expected["QOffset"] = offsets.data_ptr()
    scratch = {one.name: one for one in family(family_id).scratch(spec, config, geometry.sizes)}
    places: dict[str, set[int]] = {}
    for part, done in zip(compiled.parts, call, strict=True):
        assert done.grid == (part.kernel.programs(compiled.device, geometry.sizes), 1, 1)
        assert done.block == (32 * part.num_warps, 1, 1)
        assert done.shared_bytes == part.shared_bytes
        overlaps = part.kernel.overlaps
        assert done.attributes == ([(driver.PROGRAMMATIC_SERIALIZATION, 1)] if overlaps else [])
        assert overlaps == ("griddepcontrol.wait" in part.handle.asm["ptx"])
        for parameter in part.kernel.parameters:
            name, value = parameter.name, done.values[parameter.name]
            if name in expected:
                assert value == pytest.approx(expected[name], rel=1e-6), f"{name} of {part.kernel.entry}"
            elif name == "Counter":
                assert value != 0
            else:
                places.setdefault(piece_of(name), set()).add(value - start)
    assert places.keys() == scratch.keys(), "every piece is used, and nothing else is left to bind"
    assert places["neg_delta"] == {0}
    begins = [place for found in places.values() for place in found]
    assert len(begins) == len(set(begins)) == len(scratch), "all kernels of a call see the same memory"
    assert all(place % 256 == 0 for place in begins)
    if "split_d" in CASES[family_id][1]:
        main = next(one.values for one in call if "k1_desc" in one.values)
        assert [main[f"k{part}_desc.encoded"].box[0] for part in ("", "1")] == [64, 32], "64 and 32 of 96"


def piece_of(name: str) -> str:
    """`dq_acc` of its pointer `DqAcc` or its descriptor `dq_acc_desc`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return words.removeprefix("_").removesuffix("_desc")


def test_every_backward_family_is_here() -> None:
    assert CASES.keys() == {row.id for row in FAMILIES if row.direction == "backward"}
