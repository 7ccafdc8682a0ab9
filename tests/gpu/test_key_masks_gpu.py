"""Masks of keys on a GPU: every form of them in every kernel that skips what they hide, and what that saves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import applicable, family, invalid, unsupported
from flashgen.core.config import KnobValue
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.backward import backward_geometry
from flashgen.launch.geometry import Geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_backward_plan, make_plan
from flashgen.measure.backward_verification_case import backward_odd_problem
from flashgen.measure.feature_inputs import FeatureForm
from flashgen.measure.key_masks import FORMS
from flashgen.measure.odd_shapes import OddShape, Runnable, check_odd, odd_problem
from flashgen.measure.verification_case import VerificationCase
from tests.gpu.gate import assert_passes_the_gate
from tests.gpu.public import compile_ahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

Changes = dict[str, KnobValue]

RUNNING: Changes = {"softmax_reference": "running"}
ROW_SUMS: Changes = {"softmax_reference": "row_sums", "conditional_rescale": True, "max_chains": 1}
NAMED: Changes = {"barriers": "named", "ping_pong": True, "conditional_rescale": True, "exp_order": "data"}
MBARRIERS: Changes = {"barriers": "mbarrier", "exp_order": "free"}
FOUR_WARPGROUPS: Changes = {**MBARRIERS, "warpgroups": 4, "block_n": 64, "v_stages": 3, "k_release": "with_v"}
ONE_WARPGROUP: Changes = {**MBARRIERS, "warpgroups": 1, "blocks_per_sm": 3, "block_n": 64, "ping_pong": False}
SKIPPED: Changes = {"warpgroups": 3, "block_n": 64, "masked_blocks": "branch", "hidden_blocks": "skipped"}
HOPPER: tuple[tuple[str, Changes], ...] = (
    ("fwd-bf16-d128-keymask", {}),
    ("fwd-bf16-d128-keymask", ROW_SUMS),
    ("fwd-bf16-d128-keymask", {**RUNNING, **NAMED}),
    ("fwd-bf16-d128-keymask", {"q_stages": 2}),
    ("fwd-bf16-d64-keymask", {**FOUR_WARPGROUPS, **ROW_SUMS}),
    ("fwd-bf16-d64-keymask", {**FOUR_WARPGROUPS, **RUNNING}),
    ("fwd-fp16-d64-keymask", {**ONE_WARPGROUP, **ROW_SUMS}),
    ("fwd-fp16-d64-keymask", {**ONE_WARPGROUP, **RUNNING}),
    ("fwd-bf16-d128-causal-keymask", {"heads_per_group": 4, "masked_blocks": "one"}),
    ("fwd-bf16-d128-causal-keymask", {**ROW_SUMS, "heads_per_group": 4, "masked_blocks": "branch"}),
    ("fwd-bf16-d128-causal-keymask", {**RUNNING, **NAMED, "heads_per_group": 4, "masked_blocks": "one"}),
    ("fwd-bf16-d256-causal-keymask", {**RUNNING, "masked_blocks": "peeled"}),
    ("fwd-bf16-d64-causal-keymask-offset", {**SKIPPED, **ROW_SUMS}),
    ("fwd-fp16-d64-causal-keymask-offset", {**SKIPPED, **RUNNING}),
    ("fwd-bf16-d64-causal-window-keymask", SKIPPED),
    ("fwd-bf16-d64-window-keymask", {**SKIPPED, **RUNNING}),
    ("fwd-bf16-d128-softcap-sink-keymask", {}),
    ("fwd-bf16-d256-keymask", {}),
    ("fwd-bf16-d96-keymask-scattered", {"split_d": True, **ROW_SUMS}),
    ("fwd-bf16-d64-bias-keymask", {}),
    ("fwd-bf16-d64-alibi-keybias-keymask", {}),
)
"""Of the Hopper family: roles, references of exponentials and kinds of masked blocks that handle a mask apart."""

PORTABLE = (
    "fwd-bf16-d128-keymask",
    "fwd-fp16-d64-causal-keymask-offset",
    "fwd-bf16-d64-window-keymask-scattered",
    "fwd-fp32-d64-keymask",
)
BACKWARD = (
    "bwd-bf16-d128-keymask",
    "bwd-bf16-d64-causal-keymask",
    "bwd-fp16-d64-causal-window-keymask-offset",
    "bwd-bf16-d64-keybias-keymask-dbias",
)

PER_HEAD = (True, True)
SHAPES = (
    *(
        OddShape(seqlen_q=200, seqlen_k=1100, nheads_k=2, batch=3, form=FeatureForm(visible_keys=form))
        for form in FORMS
    ),
    # sequences of other lengths side by side, one without a key, and a mask for each head
    OddShape(
        seqlen_q=333, seqlen_k=640, batch=5, form=FeatureForm(visible_keys="ends", mask_axes=PER_HEAD, blind=True)
    ),
    # more tiles than programs, of masks that take turns
    OddShape(seqlen_q=130, seqlen_k=300, batch=70, nheads_k=1, form=FeatureForm(visible_keys="start", blind=True)),
    OddShape(seqlen_q=150, seqlen_k=384, batch=40, layout="bshd", form=FeatureForm(visible_keys="holes")),
    # many loads of a mask, and keys that no load of 16 has
    OddShape(seqlen_q=65, seqlen_k=20011, batch=2, nheads=2, nheads_k=1, form=FeatureForm(visible_keys="ends")),
    OddShape(seqlen_q=70, seqlen_k=7, q_offset=0, form=FeatureForm(visible_keys="ends")),
)
"""Every form of a mask, over blocks of keys that end with the sequence and within it."""


def shapes_of(spec: Specialization) -> list[OddShape]:
    scattered = "" if spec.aligned_scores else "odd"
    window = ((150, None) if spec.causal else (150, 40)) if spec.window else (None, None)
    found = (replace(each, form=replace(each.form, bias_dtype=spec.bias_dtype)) for each in SHAPES)
    return [replace(each, window=window, form=replace(each.form, scattered=scattered)) for each in found]


@pytest.fixture(scope="module")
def compiled() -> None:
    """All Hopper kernels are in Triton's cache: once, in many processes."""
    row, device = family("hopper_forward"), current_device()
    specs = [(Specialization.parse(key), changes) for key, changes in HOPPER]
    served = [(spec, changes) for spec, changes in specs if unsupported(row, spec, device) is None]
    compile_ahead(((spec, row.default(spec, device).replace(**changes)) for spec, changes in served), device)


@functools.lru_cache(maxsize=2)
def forward_problems(key: str) -> tuple[tuple[OddShape, VerificationCase], ...]:
    spec = Specialization.parse(key)
    return tuple((shape, odd_problem(spec, shape, "cuda")) for shape in shapes_of(spec))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("key", "changes"), HOPPER, ids=str)
def test_hopper_kernels_take_every_mask(key: str, changes: Changes) -> None:
    spec, device, row = Specialization.parse(key), current_device(), family("hopper_forward")
    if unsupported(row, spec, device) is not None:
        pytest.skip("needs a Hopper GPU")
    config = row.default(spec, device).replace(**changes)
    assert_passes_the_gate(key, config, forward_problems(key), repeats=1)


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize("key", PORTABLE)
def test_portable_kernels_take_every_mask(key: str, loads: str) -> None:
    spec, device = Specialization.parse(key), current_device()
    config = family("portable_forward").default(spec, device).replace(loads=loads)
    if invalid(config, spec, device) is not None:
        pytest.skip("no such loads")
    assert_passes_the_gate(key, config, forward_problems(key), repeats=1)


@pytest.mark.parametrize("key", BACKWARD)
def test_gradients_are_right_under_every_mask(key: str) -> None:
    """Keys that nobody sees get gradients of zero, whatever they hold."""
    spec, device = Specialization.parse(key), current_device()
    problems: list[tuple[OddShape, Runnable]] = [
        (shape, backward_odd_problem(spec, shape, "cuda", dlse=n % 2 == 1)) for n, shape in enumerate(shapes_of(spec))
    ]
    for row in applicable(spec, device):
        config = row.default(spec, device)
        compiled = compile_kernel(spec, config, device)
        factory = functools.partial(backward_plan, compiled, spec, config)
        verdict = check_odd(factory, problems)
        assert verdict is None, (row.id, str(verdict))


def backward_plan(compiled, spec, config, tensors, features):  # type: ignore[no-untyped-def]
    return make_backward_plan(compiled, spec, config, backward_geometry(tensors, features), 0)


def masked_time(launch: Callable[[Features], object], mask: torch.Tensor) -> float:
    """The least of some times of a launch, in ms."""
    features, times = Features(mask=mask), []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(features)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["hopper_forward", "portable_forward"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_costs_what_its_visible_keys_cost(name: str, head_dim: int) -> None:
    spec, device = Specialization.parse(f"fwd-bf16-d{head_dim}-keymask"), current_device()
    if unsupported(family(name), spec, device) is not None:
        pytest.skip("needs a Hopper GPU")
    config = family(name).default(spec, device)
    q, k, v = (torch.randn(2, 16, 8192, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(2, 16, 8192, device="cuda")
    keys = torch.arange(8192, device="cuda").expand(2, 1, 1, 8192)
    given = Features(mask=keys >= 0)
    plan = make_plan(compile_kernel(spec, config, device), spec, config, Geometry.of(q, k, v, out, given), 0)

    def launch(features: Features) -> None:
        plan(q, k, v, out, lse, head_dim**-0.5, 0, features)

    whole = masked_time(launch, keys >= 0)
    for quarter in (keys < 2048, keys >= 6144, (keys >= 3000) & (keys < 5048)):
        assert masked_time(launch, quarter) < 0.37 * whole  # 0.3504 on an H200
