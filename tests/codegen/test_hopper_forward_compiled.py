"""What the compiler makes of the Hopper family for the forward pass: registers, spills, and the order of a step."""

from __future__ import annotations

import functools
import re

import pytest

from flashgen.codegen import families
from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.common_wgmma import FIRST_NAMED_BARRIER
from flashgen.codegen.hopper_forward import resources as hopper_resources
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import ptx_sizes, trailing_pointers
from scripts.crosscompile_jobs import ONE_WARPGROUP
from scripts.machine_loops import disassembled
from tests.tiers import EXHAUSTIVE, first, only

H200 = find_device("h200")


@functools.cache
def compiled(key: str, **changes: int | str | bool) -> CompiledKernel:
    spec = Specialization.parse(key)
    return compile_kernel(spec, HOPPER_FORWARD.default(spec, H200).replace(**changes), H200)


@functools.cache
def machine_code(key: str) -> str:
    """That of a default."""
    return disassembled(compiled(key).handle.asm["cubin"])


LOOPS = pytest.mark.xdist_group("hopper loops")
SCORES = pytest.mark.xdist_group("hopper scores")
NAMED_BARRIERS = pytest.mark.xdist_group("hopper named barriers")
EARLY = pytest.mark.xdist_group("hopper early sums")
"""Of tests that look at the same kernels: one process compiles and disassembles them, once."""


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
    assert trailing_pointers(ptx_sizes(kernel.handle.asm["ptx"]), parameters) == 2
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
PAIR = {**ONE_WARPGROUP, "warpgroups": 2, "blocks_per_sm": 2, "qk_prefetch": "none"}
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
            ("d64-causal", {**PAIR, "masked_blocks": "branch"}),
            ("d80", {**PAIR, "split_d": True}),
        ],
        ("d64-causal", NAMED_BY_THREE),
        ("d96-causal-keymask", {**SHORT, "split_d": True}),
        ("d64-causal", {**PAIR, "masked_blocks": "branch"}),
    ),
)
def test_every_knob_compiles(key: str, changes: dict[str, int | str | bool]) -> None:
    spec = Specialization.parse(f"fwd-fp16-{key}")
    config = HOPPER_FORWARD.default(spec, H200).replace(**changes)
    assert families.invalid(config, spec, H200) is None
    kernel = compiled(spec.key, **changes)
    parameters = HOPPER_FORWARD.parameters(spec, config)
    assert trailing_pointers(ptx_sizes(kernel.handle.asm["ptx"]), parameters) == 2
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
    for part in softmaxes(disassembled(kernel.handle.asm["cubin"])):
        assert part.count("F2FP.BF16") == 128 // 4
        assert part.rindex("MUFU.LG2") > part.rindex("BAR.ARV"), "sums settle behind the last exponential"


@EXHAUSTIVE
@EARLY
@pytest.mark.parametrize("key", first(1, ["fwd-bf16-d96-causal", "fwd-bf16-d64-causal-window"]))
def test_the_sums_that_settle_early_are_those_that_the_next_step_reads(key: str) -> None:
    """Where ptxas settles a copy, as it does in configs that are refused, one of the tested sums stays as it was."""
    for part in softmaxes(disassembled(compiled(key, early_settle=True).handle.asm["cubin"])):
        tested = re.search(r"LOP3\.LUT P\d, RZ, R(\d+), 0x40000000, R(\d+)", part)
        assert tested is not None
        for register in tested.groups():
            assert re.search(rf"FMUL R{register}, R{register}(\.reuse)?, R", part[tested.end() :]), register
