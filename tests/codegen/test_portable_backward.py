"""The portable backward families without a GPU: their table, their text, and what the compiler makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen import families
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.family import KernelFamily, Sizes
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.codegen.portable_backward.resources import loops, smem_needed
from flashgen.codegen.render import render
from flashgen.codegen.space import search_space
from flashgen.core.device import CATALOGUE, Device, find_device
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization
from scripts.machine_loops import disassembled
from tests.codegen.ruff import FORMAT, assert_passes
from tests.tiers import first

FAMILY = pytest.mark.parametrize("row", [PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED], ids=lambda row: row.id[18:])

KEYS = (
    "bwd-bf16-d64",
    "bwd-fp16-d128-causal",
    "bwd-bf16-d256-causal-softcap-window",
    "bwd-bf16-d512",
    "bwd-fp32-d64",
    "bwd-fp32-d512",
    "bwd-tf32-d128",
    "bwd-bf16-d80-unaligned",
    "bwd-fp16-d192-dv128-causal",
    "bwd-bf16-d256-dv64",
    "bwd-tf32-d16-dv192",
    "bwd-bf16-d64-bias-mask-dbias",
)


@FAMILY
@pytest.mark.parametrize("device", CATALOGUE, ids=lambda device: device.slug)
def test_every_default_is_valid(row: KernelFamily, device: Device) -> None:
    for key in KEYS:
        spec = Specialization.parse(key)
        if families.unsupported(row, spec, device) is None:
            config = row.default(spec, device)
            assert families.validate(config) is config, key
            assert families.invalid(config, spec, device) is None, key
        else:
            assert key == "bwd-fp32-d512" or (spec.dtype, device.arch) == ("tf32", "gfx1200"), key


@pytest.mark.parametrize(("key", "count"), [("d64", 1), ("d128-causal", 2), ("d128-window", 0), ("d256", 0)])
def test_favourites_are_other_valid_configs(key: str, count: int) -> None:
    spec, device, row = Specialization.parse(f"bwd-bf16-{key}"), find_device("h200"), PORTABLE_BACKWARD_FUSED
    found = row.seed_configs(spec, device)
    assert len({*found, row.default(spec, device)}) == count + 1
    assert all(families.validate(config) and families.invalid(config, spec, device) is None for config in found)


@FAMILY
@pytest.mark.parametrize("device", ["h200", "rtx 4090", "mi300x"])
def test_a_space_has_only_what_fits(row: KernelFamily, device: str) -> None:
    spec, target = Specialization.parse("bwd-bf16-d128-causal"), find_device(device)
    space = search_space(row, spec, target)
    assert len(set(space)) == len(space) > 20
    for config in random.Random(0).sample(space, 20):
        assert families.validate(config) is config
        assert all(smem_needed(loop, target) <= target.smem_per_block for loop in loops(spec, config))
        assert target.has_tma or config["loads"] == "pointer"


@FAMILY
@pytest.mark.parametrize(
    ("key", "device", "change", "reason"),
    [
        ("bwd-bf16-d128-causal", "h200", {"block_n": 128, "block_m": 128}, "registers"),
        ("bwd-bf16-d256", "rtx 4090", {"block_n": 32, "block_m": 128, "num_warps": 8}, "shared memory"),
        ("bwd-bf16-d128", "b200", {"block_n": 128, "block_m": 128, "num_warps": 8}, "tensor memory"),
        ("bwd-bf16-d128", "a100", {"block_n": 32, "num_warps": 8}, "rows each"),
        ("bwd-bf16-d64", "a100", {"num_stages": 1}, "two stages"),
        ("bwd-bf16-d128", "a100", {"loads": "descriptor"}, "same kernel twice"),
        ("bwd-bf16-d128-unaligned", "h200", {"loads": "descriptor"}, "multiples of 16 bytes"),
        ("bwd-bf16-d128", "h200", {"heads_per_group": 8}, "equally heavy"),
        ("bwd-bf16-d128", "h200", {"split_d": True}, "no smaller in two parts"),
        ("bwd-bf16-d128", "mi300x", {"num_stages": 3}, "two stages"),
    ],
)
def test_restrictions_name_their_reason(
    row: KernelFamily, key: str, device: str, change: dict[str, int | str | bool], reason: str
) -> None:
    spec, target = Specialization.parse(key), find_device(device)
    config = row.default(spec, target).replace(**change)
    assert reason in str(families.invalid(config, spec, target))


@FAMILY
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("fwd-bf16-d64", "backward pass, not forward"),
        ("bwd-bf16-d64-varlen-mask", "no bias and no mask"),
        ("bwd-bf16-d64-page16", "paged"),
        ("bwd-bf16-d528", "16 to 512, not 528"),
    ],
)
def test_not_applicable_is_an_answer_with_a_reason(row: KernelFamily, key: str, reason: str) -> None:
    spec = Specialization.parse(key)
    assert reason in str(families.reasons(spec, find_device("h200"))[row.id])


@FAMILY
@pytest.mark.parametrize(
    "key", ["bwd-tf32-d128-dv512", "bwd-tf32-d64-dv512", "bwd-tf32-d32-dv512", "bwd-tf32-d512-dv64"]
)
def test_heads_whose_least_blocks_do_not_fit_are_refused(row: KernelFamily, key: str) -> None:
    """Compiled for sm89 they take 102400 to 135168 bytes of shared memory, of 101376 that a block has there."""
    reasons = families.reasons(Specialization.parse(key), find_device("rtx 4090"))
    assert "bytes of shared memory" in str(reasons[row.id])
    assert families.reasons(Specialization.parse(key), find_device("a100"))[row.id] is None


@pytest.mark.parametrize("key", first(1, ["bwd-tf32-d512-dv16", "bwd-tf32-d16-dv512", "bwd-tf32-d256"]))
def test_the_largest_least_blocks_fit(key: str) -> None:
    spec, device, row = Specialization.parse(key), find_device("rtx 4090"), PORTABLE_BACKWARD_SPLIT
    assert families.reasons(spec, device)[row.id] is None
    assert compile_kernel(spec, row.default(spec, device), device).shared_bytes <= device.smem_per_block


def test_a_full_bias_has_no_gradient_beside_a_block_mask() -> None:
    function = UserFunction(name="mask_mod", source="def mask_mod(b, h, q, k):\n    return q > k\n")
    device = find_device("h200")
    for key, blocks, reason in (("-bias-dbias", True, "beside a block mask"), ("-bias-dbias", False, None)):
        spec = replace(Specialization.parse(f"bwd-bf16-d64{key}"), mods=ScoreMods(mask_mod=function, block_mask=blocks))
        for row in (PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED):
            found = families.reasons(spec, device)[row.id]
            assert found is None if reason is None else reason in str(found)


def test_only_sums_of_a_fixed_order_are_deterministic() -> None:
    spec = Specialization.parse("bwd-bf16-d64-bias-dbias-deterministic")
    device = find_device("a100")
    assert "no fixed order" in str(families.reasons(spec, device)["portable_backward_fused"])
    assert families.default_config(spec, device).family == "portable_backward_split"
    for row in (PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED):
        text = render(spec, row.default(spec, device)).text
        assert ("atomic" in text.partition("import triton")[2]) is (row is PORTABLE_BACKWARD_FUSED)


@FAMILY
def test_kernels_share_scratch_memory_of_whole_blocks(row: KernelFamily) -> None:
    spec = Specialization.parse("bwd-bf16-d80-bias-dbias")
    config = row.default(spec, find_device("h200")).replace(block_m=128, split_d=True)
    sizes = Sizes(batch=2, nheads=6, nheads_k=3, seqlen_q=200, seqlen_k=300)
    scratch = {each.name: each for each in row.scratch(spec, config, sizes)}
    assert scratch["neg_delta"].shape == scratch["lse_log2"].shape == (2, 6, 256)
    kernels = {kernel.entry.removeprefix(f"{row.id}_"): kernel for kernel in row.kernels(spec, config)}
    programs = {name: kernel.programs(find_device("h200"), sizes) for name, kernel in kernels.items()}
    keys = -(-300 // config.integer("block_n")) * 2 * 3
    if row is PORTABLE_BACKWARD_FUSED:
        assert scratch["dq_acc"].shape == (2, 6, 256, 80)
        assert programs == {"prepare": 4 * 12, "main": keys, "finish": 4 * 12, "dbias": 4 * 10 * 12}
    else:
        assert programs == {"prepare": 4 * 12, "dkdv": keys, "dq": 2 * 12, "dbias": 4 * 10 * 12}
    assert all(kernel.entry in render(spec, config).text for kernel in kernels.values())


@pytest.mark.parametrize(
    ("key", "device", "instructions"),
    first(
        1,
        [
            ("bwd-bf16-d64-causal", "h200", ("HGMMA", "UTMALDG")),
            ("bwd-fp16-d128", "a100", ("HMMA", "LDGSTS.E.BYPASS")),
        ],
    ),
)
@FAMILY
def test_the_matrix_unit_and_wide_loads_are_used(
    row: KernelFamily, key: str, device: str, instructions: tuple[str, ...]
) -> None:
    spec, target = Specialization.parse(key), find_device(device)
    compiled = compile_kernel(spec, row.default(spec, target), target)
    assert compiled.spills <= row.tolerated_spills
    assert compiled.shared_bytes <= target.smem_per_block
    code = disassembled(compiled.parts[1].handle.asm["cubin"])
    assert all(instruction in code for instruction in instructions)
    assert ("RED" in code) is (row is PORTABLE_BACKWARD_FUSED)


def test_every_variant_is_formatted_and_compiles_as_python(tmp_path: Path) -> None:
    keys = (
        "bwd-bf16-d64",
        "bwd-fp32-d80-causal-offset",
        "bwd-bf16-d192-causal-softcap-alibi-bias-mask-window-scattered-dbias",
        "bwd-fp16-d64-alibi-keybias-keymask-window-unaligned-dbias",
        "bwd-tf32-d512-softcap-window-mask",
        "bwd-bf16-d128-causal-window-keymask-offset",
    )
    for spec in map(Specialization.parse, keys):
        for row in (PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED):
            for loads, split in (("pointer", False), ("descriptor", True)):
                changes = {"loads": loads, "split_d": split, "heads_per_group": 8 if split else 1}
                config = row.default(spec, find_device("h200")).replace(**changes)
                source = render(spec, config)
                compile(source.text, "kernel", "exec")
                (tmp_path / f"{source.module}.py").write_text(source.text)
    assert_passes(tmp_path, *FORMAT)
    assert_passes(tmp_path, "check", "--select", "F")
    assert len(list(tmp_path.iterdir())) == len(keys) * 4
