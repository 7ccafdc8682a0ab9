"""The Hopper family for the forward pass: what it offers and refuses, its arithmetic of resources, and its text."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from flashgen.codegen import families
from flashgen.codegen.common_wgmma import descriptor_type
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import resources as hopper_resources
from flashgen.codegen.hopper_forward import seed_configs as hopper_seed_configs
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import render
from flashgen.codegen.space import search_space
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.codegen.ruff import FORMAT, assert_passes
from tests.codegen.spaces import some_of
from tests.tiers import EXHAUSTIVE

H200 = find_device("h200")
HEAD_DIMS = (40, 64, 72, 80, 96, 128, 160, 192, 216, 256)


@pytest.mark.parametrize("causal", ["", "-causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_defaults_are_valid_wherever_the_family_applies(head_dim: int, causal: str) -> None:
    for head_dim_v in HEAD_DIMS:
        spec = Specialization.parse(f"fwd-bf16-d{head_dim}-dv{head_dim_v}{causal}")
        config = HOPPER_FORWARD.default(spec, H200)
        assert families.validate(config) is config
        assert families.invalid(config, spec, H200) is None
        assert families.default_config(spec, H200) == config


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("d64", 3),
        ("d64-causal", 4),
        ("d64-causal-sink-window", 4),
        ("d128", 3),
        ("d128-causal", 5),
        ("d128-causal-offset", 4),
        ("d128-window", 2),
        ("d192-dv128-causal", 4),
        ("d256", 2),
        ("d256-causal-softcap-window", 4),
    ],
)
def test_favourites_are_other_valid_configs(key: str, least: int) -> None:
    spec = Specialization.parse(f"fwd-bf16-{key}")
    found = HOPPER_FORWARD.seed_configs(spec, H200)
    assert len(set(found)) == len(found) >= least
    assert all(families.validate(config) and families.invalid(config, spec, H200) is None for config in found)


def test_every_favourite_is_valid_somewhere() -> None:
    """A change that no plain workload allows would only take up room."""
    for (width, causal), changes in hopper_seed_configs.SEED_CONFIGS.items():
        spec = Specialization.parse(f"fwd-bf16-d{width}{'-causal' if causal else ''}")
        known = {*HOPPER_FORWARD.seed_configs(spec, H200), HOPPER_FORWARD.default(spec, H200)}
        usual = HOPPER_FORWARD.default(spec, H200)
        assert known >= {usual.replace(**change) for change in changes}


def test_a_space_has_only_what_fits() -> None:
    spec = Specialization.parse("fwd-bf16-d64-causal")
    space = search_space(HOPPER_FORWARD, spec, H200)
    assert len(set(space)) == len(space) > 100
    shapes = {(config["warpgroups"], config["blocks_per_sm"], config["block_n"]) for config in space}
    assert {(4, 1, 64), (1, 3, 64), (2, 2, 64), (3, 1, 128), (2, 1, 128)} <= shapes
    assert not {(4, 1, 128), (1, 3, 128), (3, 2, 64), (2, 2, 128), (2, 3, 64)} & shapes


def test_the_registers_of_the_roles_are_what_was_measured() -> None:
    default = HOPPER_FORWARD.default(Specialization.parse("fwd-bf16-d64"), H200)
    found = {}
    for warpgroups, blocks in ((2, 1), (3, 1), (4, 1), (1, 3), (1, 2), (2, 2), (1, 4)):
        config = default.replace(warpgroups=warpgroups, blocks_per_sm=blocks)
        found[warpgroups, blocks] = (
            hopper_resources.maxnreg(config, H200),
            hopper_resources.consumer_registers(config, H200),
        )
    assert found == {
        (2, 1): (168, 240),
        (3, 1): (128, 160),
        (4, 1): (96, 112),
        (1, 3): (80, 136),
        (1, 2): (128, 232),
        (2, 2): (80, 104),
        (1, 4): (64, 104),
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_n": 128}, "registers"),
        ({"v_stages": 3}, "shared memory"),
        ({"heads_per_group": 1}, "most keys"),
        ({"barriers": "mbarrier"}, "named barrier"),
        ({"barriers": "mbarrier", "exp_order": "barrier", "conditional_rescale": False}, "conditional rescale"),
        ({"max_chains": 4}, "one"),
        ({"masked_blocks": "one"}, "diagonal"),
        ({"blocks_per_sm": 2, "block_n": 64, "exp_order": "free"}, "no registers for scores ahead"),
        (
            {"blocks_per_sm": 2, "block_n": 64, "exp_order": "free", "qk_prefetch": "none"},
            "side by side as two of two, which take turns by themselves",
        ),
        ({"blocks_per_sm": 2, "block_n": 64, "warpgroups": 3, "exp_order": "free"}, "side by side as two of two"),
        ({"warpgroups": 1, "ping_pong": False}, "leaves the tensor cores idle"),
        ({"warpgroups": 1}, "take turns"),
        ({"masked_blocks": "peeled", "warpgroups": 3, "softmax_reference": "running"}, "second loop"),
        ({"masked_blocks": "peeled"}, "apart from the others anyway"),
        ({"conditional_rescale": False, "exp_order": "free"}, "one way to do so"),
        ({"qk_prefetch": "half"}, "three warpgroups or four of several programs lack"),
        ({"split_d": True}, "no smaller"),
        ({"early_settle": True, "softmax_reference": "running"}, "where references follow them"),
        ({"early_settle": True, "exp_order": "free", "barriers": "mbarrier"}, "ptxas computes wrong sums"),
        ({"early_settle": True, "exp_order": "data", "barriers": "named"}, "never faster"),
    ],
)
def test_restrictions_name_their_reason(change: dict[str, int | str | bool], reason: str) -> None:
    spec = Specialization.parse("fwd-bf16-d256-causal")
    config = HOPPER_FORWARD.default(spec, H200).replace(**change)
    assert reason in str(families.invalid(config, spec, H200))


def test_windows_have_tiles_in_any_order_and_blocks_that_a_warpgroup_skips() -> None:
    changes = {"warpgroups": 2, "block_n": 64, "v_stages": 3, "hidden_blocks": "skipped", "exp_order": "free"}
    for key in ("d128-causal-window", "d128-window"):
        spec = Specialization.parse(f"fwd-bf16-{key}")
        config = HOPPER_FORWARD.default(spec, H200).replace(**changes, heads_per_group=1)
        assert families.invalid(config, spec, H200) is None
        assert config in search_space(HOPPER_FORWARD, spec, H200)
        text = render(spec, config).text
        assert text.count("_skip(wg, step + i, buffers, barriers)") == 2, (
            "blocks behind the last key, and before the first"
        )
    plain = Specialization.parse("fwd-bf16-d128")
    config = HOPPER_FORWARD.default(plain, H200).replace(**changes)
    assert "every block that its tile sees" in str(families.invalid(config, plain, H200))


def test_what_wins_for_short_windows_is_tried_first() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal-window")
    found = HOPPER_FORWARD.seed_configs(spec, H200)
    skipping = [config["hidden_blocks"] == "skipped" for config in found]
    assert sum(skipping[:5]) >= 4 > sum(skipping[5:])


def test_four_programs_side_by_side_compute_scores_after_the_product() -> None:
    spec = Specialization.parse("fwd-bf16-d64-causal-window")
    found = {
        config["qk_prefetch"] for config in search_space(HOPPER_FORWARD, spec, H200) if config["blocks_per_sm"] == 4
    }
    assert found == {"half", "none"}
    wide = Specialization.parse("fwd-bf16-d128-causal-window")
    assert not any(config["blocks_per_sm"] > 2 for config in search_space(HOPPER_FORWARD, wide, H200))


@pytest.mark.parametrize(
    ("key", "device", "reason"),
    [
        ("fwd-bf16-d128", "a100", "sm90"),
        ("fwd-fp32-d128", "h200", "fp32"),
        ("fwd-bf16-d36", "h200", "head_dim"),
        ("fwd-bf16-d128-unaligned", "h200", "16 bytes"),
        ("fwd-bf16-d128-bias-scattered", "h200", "1 along the keys"),
        ("fwd-bf16-d128-keybias-mask-scattered", "h200", "1 along the keys"),
        ("fwd-bf16-d256-bias-mask-bias_fp32", "h200", "do not fit"),
        ("fwd-bf16-d128-page16", "h200", "paged"),
        ("fwd-bf16-d128-varlen-page12", "h200", "from whole pages of a multiple of 8"),
        ("fwd-bf16-d128-varlen-page24", "h200", "got 24"),
    ],
)
def test_the_portable_family_serves_the_rest(key: str, device: str, reason: str) -> None:
    spec = Specialization.parse(key)
    assert reason in str(families.reasons(spec, find_device(device))["hopper_forward"])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bf16", (64, 64)),
        ("bf16", (128, 128)),
        ("fp16", (64, 256)),
        ("bf16", (64, 32)),
        ("u8", (64, 64)),
        ("fp32", (64, 128)),
    ],
)
def test_a_layout_is_written_as_triton_writes_it(dtype: str, shape: tuple[int, int]) -> None:
    gl = pytest.importorskip("triton.experimental.gluon.language")
    types = {"bf16": gl.bfloat16, "fp16": gl.float16, "u8": gl.uint8, "fp32": gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, *shape], types[dtype])
    assert descriptor_type(dtype, *shape) == f"tensordesc<{dtype}[1, 1, {shape[0]}, {shape[1]}],{layout!r}>"


def test_a_launch_has_no_more_programs_than_tiles() -> None:
    config = HOPPER_FORWARD.default(Specialization.parse("fwd-bf16-d128"), H200)
    kernel = HOPPER_FORWARD.kernels(Specialization.parse("fwd-bf16-d128"), config)[0]
    for (batch, nheads, seqlen), programs in {(1, 4, 129): 8, (8, 16, 2048): 132}.items():
        sizes = Sizes(batch=batch, nheads=nheads, nheads_k=nheads, seqlen_q=seqlen, seqlen_k=seqlen)
        assert kernel.programs(H200, sizes) == programs


@pytest.mark.parametrize(("queries", "keys"), [(300, 5000), (300, 4992), (128, 128), (1, 4097), (256, 300)])
def test_blocks_that_are_cut_along_the_diagonal_have_a_program_each(queries: int, keys: int) -> None:
    """The first one begins before the first row, so there may be one more: it would wait for another one to end."""
    spec = Specialization.parse("fwd-bf16-d128-causal")
    config = HOPPER_FORWARD.default(spec, H200)
    assert (config["masked_blocks"], hopper_resources.tile_rows(config)) == ("one", 128)
    (kernel,) = HOPPER_FORWARD.kernels(spec, config)
    sizes = Sizes(batch=1, nheads=16, nheads_k=16, seqlen_q=queries, seqlen_k=keys)
    blocks = -(-(queries + (keys - queries) % 128) // 128)
    assert min(132, 16 * blocks) <= kernel.programs(H200, sizes) <= 16 * (blocks + 1)


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@EXHAUSTIVE
def test_every_variant_is_formatted_and_unpacks_what_it_packs(tmp_path: Path) -> None:
    keys = ["d64-causal", "d128", "d256-causal-offset", "d192-dv128-causal"]
    keys += [
        "d128-window",
        "d64-causal-sink-window-offset",
        "d256-softcap",
        "d128-alibi",
        "d64-causal-keybias-scattered",
    ]
    keys += ["d64-causal-softcap-alibi-sink-keybias-keymask-window-scattered", "d128-causal-keymask"]
    keys += ["d96-causal-bias-mask", "d192-dv96-softcap-alibi-sink-bias-keymask-window"]
    generator = random.Random(0)
    for key in (f"fwd-fp16-{key}" for key in keys):
        spec = Specialization.parse(key)
        for config in some_of(HOPPER_FORWARD, spec, H200, 9, generator):
            source = render(spec, config)
            (tmp_path / f"{source.module}.py").write_text(source.text)
            assigned = [node for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.Assign)]
            packed = [node.value for node in assigned if is_name(node.targets[0], "barriers")]
            unpacked = [ast.unparse(node.targets[0]) for node in assigned if is_name(node.value, "barriers")]
            assert len(packed) == 1
            assert unpacked.count(ast.unparse(packed[0])) == len(unpacked) >= 3
    assert_passes(tmp_path, *FORMAT)
