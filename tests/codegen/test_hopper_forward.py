"""The Hopper family without a GPU: its arithmetic of resources, its text, and what the compiler makes of it."""

from __future__ import annotations

import ast
import functools
import math
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen import families
from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.common_wgmma import FIRST_NAMED_BARRIER, descriptor_type
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import resources as hopper_resources
from flashgen.codegen.hopper_forward import seed_configs as hopper_seed_configs
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.inspect import sass
from flashgen.codegen.render import render
from flashgen.codegen.space import search_space
from flashgen.core.device import find_device
from flashgen.core.errors import ConfigError
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import trailing_pointers
from scripts.crosscompile_jobs import ONE_WARPGROUP
from tests.codegen.ruff import FORMAT, assert_passes
from tests.codegen.spaces import some_of
from tests.tiers import EXHAUSTIVE, first, only

H200 = find_device("h200")
HEAD_DIMS = (40, 64, 72, 80, 96, 128, 160, 192, 216, 256)


@functools.cache
def compiled(key: str, **changes: int | str | bool) -> CompiledKernel:
    spec = Specialization.parse(key)
    return compile_kernel(spec, HOPPER_FORWARD.default(spec, H200).replace(**changes), H200)


@functools.cache
def machine_code(key: str) -> str:
    """That of a default."""
    return sass(compiled(key).handle)


LOOPS = pytest.mark.xdist_group("hopper loops")
SCORES = pytest.mark.xdist_group("hopper scores")
NAMED_BARRIERS = pytest.mark.xdist_group("hopper named barriers")
EARLY = pytest.mark.xdist_group("hopper early sums")
"""Of tests that look at the same kernels: one process compiles and disassembles them, once."""


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


@pytest.mark.parametrize(
    ("key", "reference"),
    [
        ("bf16-d64-causal", "row_sums"),
        ("bf16-d128-causal-window", "row_sums"),
        ("fp16-d128-causal", "row_sums"),
        ("fp16-d64-softcap", "row_sums"),
        ("bf16-d64-softcap-alibi", "row_sums"),
        ("bf16-d64-softcap", "first_block"),
        ("bf16-d64-keymask", "row_sums"),
        ("bf16-d64-softcap-keymask", "first_block"),
        ("bf16-d64-mask", "running"),
    ],
)
def test_defaults_take_the_same_time_on_all_data(key: str, reference: str) -> None:
    spec = Specialization.parse(f"fwd-{key}")
    default = HOPPER_FORWARD.default(spec, H200)
    assert default["softmax_reference"] == reference
    searched = {config["softmax_reference"] for config in search_space(HOPPER_FORWARD, spec, H200)}
    assert searched == {reference, "running"}


@pytest.mark.parametrize(
    ("key", "reference", "successor"),
    [
        ("bf16-d64-causal", "first_block", "row_sums"),
        ("bf16-d64-causal", "row_sums", "row_sums"),
        ("bf16-d64-causal", "running", "running"),
        ("bf16-d64-causal-softcap", "first_block", "first_block"),  # no sum overflows
        ("fp16-d64-softcap", "first_block", "row_sums"),
    ],
)
def test_references_that_stay_have_a_successor_that_follows(key: str, reference: str, successor: str) -> None:
    spec = Specialization.parse(f"fwd-{key}")
    config = HOPPER_FORWARD.default(spec, H200).replace(softmax_reference=reference)
    assert families.successor(config, spec) == config.replace(softmax_reference=successor)


def test_no_text_lets_sums_overflow() -> None:
    spec = Specialization.parse("fwd-bf16-d64")
    config = HOPPER_FORWARD.default(spec, H200).replace(softmax_reference="first_block")
    with pytest.raises(ConfigError, match="softcap bounds"):
        render(spec, config)


def test_configs_of_other_families_are_their_own_successors() -> None:
    for row in families.FAMILIES:
        spec = Specialization.parse(f"{'fwd' if row.direction == 'forward' else 'bwd'}-bf16-d64")
        if row is not HOPPER_FORWARD:
            assert families.successor(row.default(spec, H200), spec) == row.default(spec, H200)


def test_a_space_has_only_what_fits() -> None:
    spec = Specialization.parse("fwd-bf16-d64-causal")
    space = search_space(HOPPER_FORWARD, spec, H200)
    assert len(set(space)) == len(space) > 100
    shapes = {(config["warpgroups"], config["blocks_per_sm"], config["block_n"]) for config in space}
    assert {(4, 1, 64), (1, 3, 64), (3, 1, 128), (2, 1, 128)} <= shapes
    assert not {(4, 1, 128), (1, 3, 128), (3, 2, 64)} & shapes


def test_the_registers_of_the_roles_are_what_was_measured() -> None:
    default = HOPPER_FORWARD.default(Specialization.parse("fwd-bf16-d64"), H200)
    found = {}
    for warpgroups, blocks in ((2, 1), (3, 1), (4, 1), (1, 3), (1, 2)):
        config = default.replace(warpgroups=warpgroups, blocks_per_sm=blocks)
        found[warpgroups, blocks] = (
            hopper_resources.maxnreg(config, H200),
            hopper_resources.consumer_registers(config, H200),
        )
    assert found == {(2, 1): (168, 240), (3, 1): (128, 160), (4, 1): (96, 112), (1, 3): (80, 136), (1, 2): (128, 232)}


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
        ({"blocks_per_sm": 2, "block_n": 64, "warpgroups": 2}, "side by side"),
        ({"warpgroups": 1}, "take turns"),
        ({"masked_blocks": "peeled", "warpgroups": 3, "softmax_reference": "running"}, "second loop"),
        ({"masked_blocks": "peeled"}, "apart from the others anyway"),
        ({"conditional_rescale": False, "exp_order": "free"}, "one way to do so"),
        ({"qk_prefetch": "half"}, "three warpgroups or four programs lack"),
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


def test_under_a_softcap_no_tile_is_recomputed() -> None:
    """What bounds scores bounds weights: from the lowest first key to the highest later one fp32 has room."""
    capped, open_ended = (Specialization.parse(f"fwd-bf16-{key}") for key in ("d256-softcap", "d256-softcap-alibi"))
    for spec, again in ((capped, False), (open_ended, True), (Specialization.parse("fwd-fp16-d256-softcap"), True)):
        config = HOPPER_FORWARD.default(spec, H200)
        assert config["softmax_reference"] == ("row_sums" if again else "first_block")
        assert hopper_resources.may_recompute(spec, config) == again
        text = render(spec, config).text
        assert ("overflow_flags" in text) == again
        assert ("> LARGEST_SCALE" in text) != again
    weight = hopper_resources.CAPPED_BITS - hopper_resources.CAPPED_HEADROOM_BITS
    keys, values, fp32 = 17, 14, 127
    assert weight + keys + values <= fp32
    gemma = 50.0
    assert 2 * gemma / math.log(2) < hopper_resources.CAPPED_BITS


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


@EXHAUSTIVE
@pytest.mark.parametrize(
    "key",
    only(
        [
            "d64-causal-sink-window",
            "d256-causal-softcap-window",
            "d64-keybias-window-bias_fp32-scattered",
            "d128-causal-keymask-offset",
            "d64-causal-softcap-alibi-sink-keybias-keymask-window-sink_bf16",
            pytest.param("d128-bias", marks=SCORES),
            pytest.param("d128-causal-mask", marks=SCORES),
            "d64-softcap-alibi-sink-bias-mask-window-offset-bias_fp32",
        ],
        "d64-softcap-alibi-sink-bias-mask-window-offset-bias_fp32",
    ),
)
def test_features_compile_and_leave_the_loop_as_it_is(key: str) -> None:
    spec = Specialization.parse(f"fwd-bf16-{key}")
    config = HOPPER_FORWARD.default(spec, H200)
    assert families.invalid(config, spec, H200) is None
    kernel = compiled(spec.key)
    parameters = HOPPER_FORWARD.parameters(spec, config)
    assert trailing_pointers(kernel.handle.asm["ptx"], parameters) == 2
    assert kernel.spills <= 72
    separate_o_smem = hopper_resources.separate_o_smem(spec, config, H200)
    assert kernel.shared_bytes <= hopper_resources.smem_bytes(spec, config, separate_o_smem=separate_o_smem)
    code = machine_code(spec.key)
    assert code.count("WARPGROUP.DEPBAR") * 4 <= code.count("HGMMA")


@SCORES
@EXHAUSTIVE
def test_a_tile_of_a_bias_is_in_registers_before_the_scores_are_computed() -> None:
    """Else its slot would be free, and the next tile asked for, only a product later."""
    code = machine_code("fwd-bf16-d128-bias")
    waits = code.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[:-1]
    assert len(waits) == 2
    for part in waits:
        during = part[part.rindex("HGMMA") :]
        assert during.count("LDSM.16.M88.4") == 8, (
            "64 x 128 values of two bytes, four matrices of 8 x 8 a time and warp"
        )
        assert during.rindex("LDSM") < during.rindex("BAR.ARV")


@SCORES
@EXHAUSTIVE
def test_all_that_one_byte_of_a_mask_costs() -> None:
    """The compiler left to itself packs and unpacks the tests of all bytes: three times as much."""
    code = machine_code("fwd-bf16-d128-causal-mask")
    during = softmaxes(code)
    assert len(during) == 2
    for part in during:
        scores = part.split("MUFU.EX2")[0]
        assert scores.count("PRMT") < 16
        assert scores.count("LOP3") <= 72


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


@pytest.mark.parametrize(
    "key",
    only(
        [
            "fwd-bf16-d64",
            "fwd-bf16-d64-causal",
            pytest.param("fwd-bf16-d128", marks=LOOPS),
            "fwd-bf16-d128-causal-offset",
            pytest.param("fwd-fp16-d256", marks=LOOPS),
            "fwd-bf16-d256-causal",
            "fwd-bf16-d192-dv128",
            pytest.param("fwd-bf16-d128-causal", marks=LOOPS),  # which the next tests look at
        ],
        "fwd-bf16-d128-causal",
    ),
)
def test_defaults_compile_without_serialised_products(key: str) -> None:
    kernel = compiled(key)
    config = HOPPER_FORWARD.default(Specialization.parse(key), H200)
    code = machine_code(key)
    # spills around the loop cost little, and those of a branch of masked blocks only where blocks are masked
    assert kernel.spills <= 40
    if config["masked_blocks"] != "branch":
        assert not re.search(r"\b(?:LDL|STL)\b", "".join(softmaxes(code)))
    assert code.count("WARPGROUP.DEPBAR") * 4 < code.count("HGMMA")
    assert kernel.shared_bytes <= hopper_resources.smem_available(config, H200)
    assert kernel.num_warps == 4 * (config.integer("warpgroups") + 1)
    assert kernel.occupancy(H200) == 1


def softmaxes(code: str) -> list[str]:
    """Of each loop the machine code between the wait for the scores and that for the product."""
    after_scores = code.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]
    return [part.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0] for part in after_scores]


NAMED_BY_THREE = {"barriers": "named"}
NAMED_BY_FOUR = {
    "barriers": "named",
    "warpgroups": 4,
    "block_n": 64,
    "heads_per_group": 32,
    "exp_order": "free",
    "k_release": "with_v",
}


@EXHAUSTIVE
@NAMED_BARRIERS
@pytest.mark.parametrize("changes", first(1, [NAMED_BY_THREE, NAMED_BY_FOUR]), ids=["three", "four"])
def test_triton_leaves_the_named_barriers_that_a_kernel_takes(changes: dict[str, int | str]) -> None:
    handle = compiled("fwd-fp16-d64-causal", **changes).handle
    own = set(re.findall(r"// begin inline asm\n\s*bar\.\w+ (%r\d+)", handle.asm["ptx"]))
    assert own
    ids = {int(number) for number in re.findall(r"\bbar(?:rier)?\.sync\S*\s+(\d+)", handle.asm["ptx"])}
    assert ids
    assert max(ids) < FIRST_NAMED_BARRIER


NAMED = {"barriers": "named", "conditional_rescale": True, "exp_order": "data"}
ONCE = {"q_stages": 1, "hidden_blocks": "computed"}
SHORT = {**ONE_WARPGROUP, "blocks_per_sm": 3}
WIDE = {"warpgroups": 3, "block_n": 128, "v_stages": 2, "barriers": "mbarrier", "exp_order": "free"}


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("key", "changes"),
    only(
        [
            pytest.param("d64-causal", NAMED_BY_THREE, marks=NAMED_BARRIERS),
            pytest.param("d64-causal", NAMED_BY_FOUR, marks=NAMED_BARRIERS),
            ("d64-causal", {**NAMED, **ONCE, "warpgroups": 1, "blocks_per_sm": 3, "block_n": 64, "ping_pong": False}),
            ("d64-causal", {**ONCE, "warpgroups": 2, "masked_blocks": "one", "heads_per_group": 2}),
            ("d64-causal-offset", {**SHORT, "masked_blocks": "peeled", "softmax_reference": "running"}),
            ("d128", {"barriers": "mbarrier", "exp_order": "barrier", "max_chains": 4, "softmax_reference": "running"}),
            ("d128", {**ONE_WARPGROUP, "conditional_rescale": False, "softmax_reference": "running"}),
            ("d128-causal", {**WIDE, "qk_prefetch": "half", "masked_blocks": "branch", "softmax_reference": "running"}),
            ("d64", {**WIDE, "qk_prefetch": "none"}),
            ("d96-causal-keymask", {**SHORT, "split_d": True}),
            ("d64-mask", {**ONE_WARPGROUP, "barriers": "mbarrier"}),
        ],
        ("d64-causal", NAMED_BY_THREE),
        ("d96-causal-keymask", {**SHORT, "split_d": True}),
    ),
)
def test_every_knob_compiles(key: str, changes: dict[str, int | str | bool]) -> None:
    spec = Specialization.parse(f"fwd-fp16-{key}")
    config = HOPPER_FORWARD.default(spec, H200).replace(**changes)
    assert families.invalid(config, spec, H200) is None
    kernel = compiled(spec.key, **changes)
    parameters = HOPPER_FORWARD.parameters(spec, config)
    assert trailing_pointers(kernel.handle.asm["ptx"], parameters) == 2
    separate_o_smem = hopper_resources.separate_o_smem(spec, config, H200)
    assert kernel.shared_bytes <= hopper_resources.smem_bytes(spec, config, separate_o_smem=separate_o_smem)


@LOOPS
@pytest.mark.parametrize(
    ("key", "branch"),
    first(
        1,
        [
            ("fwd-bf16-d128-causal", r"LOP3\.LUT P\d, RZ, R\d+, 0x40000000, R\d+"),
            ("fwd-fp16-d256", r"FSETP\.GT\.\w+ P\d, PT, R\d+, 65504, "),
        ],
    ),
)
def test_a_step_tests_its_row_sums_by_few_instructions(key: str, branch: str) -> None:
    """The usual path of a step computes no maximum, and what `_settle` does stands behind a vote of the warp."""
    spec = Specialization.parse(key)
    config = HOPPER_FORWARD.default(spec, H200)
    assert families.invalid(config, spec, H200) is None
    assert compiled(key).spills <= HOPPER_FORWARD.tolerated_spills
    assert re.search(branch, machine_code(key))


@pytest.mark.parametrize("early_settle", [False, True])
def test_fp16_settles_by_what_a_step_adds(early_settle: bool) -> None:
    """Sums of all steps grow with the number of keys, though no weight comes near the largest number of fp16."""
    spec = Specialization.parse("fwd-fp16-d96-causal")
    text = render(spec, HOPPER_FORWARD.default(spec, H200).replace(early_settle=early_settle)).text
    assert re.search(r"l_i = .* \+ sums$", text, re.MULTILINE)
    assert re.search(r" _settle\(p, .*m_i, l_i, sums\)$", text, re.MULTILINE)
    found: dict[str, Any] = {}
    body = text[text.index("def _settle_asm(") : text.index("SETTLE_ASM =")]
    exec(body, found)
    acc, weights = (32 if early_settle else 16), 32
    operands = found["_settle_constraints"](acc, weights).split(",")
    asm = found["_settle_asm"](acc, weights, "0f40C00000")
    (limit,) = {int(bits, 16) for bits in re.findall(r"setp\.gt\S* p, \$\d+, 0f([0-9A-F]{8})", asm)}
    assert struct.unpack("<f", struct.pack("<I", limit)) == (65504.0,), "the largest number of fp16"
    tested = {int(number) for number in re.findall(r"(?:setp\.gt\S* p,|mov\.f32 x,) \$(\d+)", asm)}
    assert tested == {min(tested), min(tested) + 2}, "two rows of one operand"
    assert set(operands[min(tested) :]) == {"f"}, "which is an input"
    assert max(int(number) for number in re.findall(r"\$(\d+)", asm)) == max(tested), "and the last one"


@LOOPS
@pytest.mark.parametrize(
    "key", only(["fwd-bf16-d128", "fwd-bf16-d128-causal", "fwd-fp16-d256"], "fwd-bf16-d128-causal")
)
def test_exponentials_stay_ahead_of_the_wait_for_the_product(key: str) -> None:
    ahead = [part.count("MUFU.EX2") for part in softmaxes(machine_code(key))]
    block_n = HOPPER_FORWARD.default(Specialization.parse(key), H200).integer("block_n")
    assert min(ahead) >= block_n // 2, ahead


@EXHAUSTIVE
@EARLY
def test_what_settles_early_is_rounded_ahead_of_the_wait_for_the_product() -> None:
    kernel = compiled("fwd-bf16-d96-causal", early_settle=True)
    assert kernel.spills == 0
    for part in softmaxes(sass(kernel.handle)):
        assert part.count("F2FP.BF16") == 128 // 4
        assert part.rindex("MUFU.LG2") > part.rindex("BAR.ARV"), "sums settle behind the last exponential"


@EXHAUSTIVE
@EARLY
@pytest.mark.parametrize("key", first(1, ["fwd-bf16-d96-causal", "fwd-bf16-d64-causal-window"]))
def test_the_sums_that_settle_early_are_those_that_the_next_step_reads(key: str) -> None:
    """Where ptxas settles a copy, as it does in configs that are refused, one of the tested sums stays as it was."""
    for part in softmaxes(sass(compiled(key, early_settle=True).handle)):
        tested = re.search(r"LOP3\.LUT P\d, RZ, R(\d+), 0x40000000, R(\d+)", part)
        assert tested is not None
        for register in tested.groups():
            assert re.search(rf"FMUL R{register}, R{register}(\.reuse)?, R", part[tested.end() :]), register


@pytest.mark.parametrize("key", ["d64", "d128-causal", "d64-causal-window", "d64-keymask", "d64-causal-keymask"])
def test_rows_of_fp16_have_seen_many_keys_before_the_maximum_is_left(key: str) -> None:
    """A key may be more than 127 bits below the next block's largest, and fp16 has no room for headroom against it."""
    for dtype, many in (("fp16", True), ("bf16", False)):
        spec = Specialization.parse(f"fwd-{dtype}-{key}")
        text = render(spec, HOPPER_FORWARD.default(spec, H200)).text
        seen = "visible_end" if "keymask" in key else "seqlen_k"
        seen = f"gl.minimum(first_row + offset + 1, {seen})" if spec.causal else seen
        assert (f"followed_from = {seen} - FOLLOWED_KEYS" in text) == many
        assert ("FEW_KEYS" in text) == (spec.causal and not many)


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
