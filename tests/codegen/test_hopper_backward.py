"""The Hopper backward families without a GPU: arithmetic of resources, order of tiles, text, and what is compiled."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.codegen import families
from flashgen.codegen.build import CompiledKernel, compile_kernel
from flashgen.codegen.common_wgmma import FIRST_NAMED_BARRIER, NAMED_BARRIERS
from flashgen.codegen.family import KernelFamily, Sizes
from flashgen.codegen.hopper_backward import resources as hopper_backward_resources
from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.codegen.render import render
from flashgen.codegen.space import search_space
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import ptx_sizes, trailing_pointers
from scripts.machine_loops import disassembled
from tests.codegen.ruff import FORMAT, assert_passes
from tests.tiers import EXHAUSTIVE, only

H200 = find_device("h200")
HEAD_DIMS = (40, 64, 72, 80, 96, 128, 160, 192, 216, 256)
FUSED, SPLIT = HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
BOTH = (FUSED, SPLIT)


def spec_of(key: str) -> Specialization:
    return Specialization.parse(f"bwd-{key}")


@pytest.mark.parametrize("mask", ["", "-causal", "-causal-window-offset", "-window"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_defaults_and_favourites_are_valid_wherever_a_family_applies(head_dim: int, mask: str) -> None:
    for head_dim_v in HEAD_DIMS:
        spec = spec_of(f"bf16-d{head_dim}-dv{head_dim_v}{mask}")
        rows = [row for row in BOTH if families.unsupported(row, spec, H200) is None]
        assert rows == [*([FUSED] if max(head_dim, head_dim_v) <= 128 else []), SPLIT]
        assert families.default_config(spec, H200) == rows[0].default(spec, H200)
        for row in rows:
            default = row.default(spec, H200)
            found = (default, *row.seed_configs(spec, H200))
            assert len(set(found)) == len(found) > 1
            assert all(families.validate(each) and families.invalid(each, spec, H200) is None for each in found)


def test_a_deterministic_pass_has_fixed_sums() -> None:
    found = families.reasons(spec_of("bf16-d128-deterministic"), H200)
    assert found["hopper_backward_split"] is None
    assert "order" in str(found["hopper_backward_fused"])
    config = SPLIT.default(spec_of("bf16-d128"), H200)
    text = render(spec_of("bf16-d128"), config).text
    assert "add_out" not in text
    assert "atomic_add(Counter, 1)" in text  # which tile is next, and nothing that is summed
    assert text.count("atomic") == 1


@pytest.mark.parametrize(
    ("row", "key", "change", "reason"),
    [
        (FUSED, "d128", {"block_m": 128}, "registers"),
        (FUSED, "d128-causal", {"heads_per_group": 1}, "most queries"),
        (FUSED, "d128", {"heads_per_group": 2}, "equally heavy"),
        (FUSED, "d128", {"persistent": False, "dq_conversion": "tiles"}, "two kinds"),
        (FUSED, "d64", {"block_m": 64, "dq_conversion": "tiles"}, "swizzle"),
        (FUSED, "d64", {"q_stages": 3, "block_m": 128}, None),
        (FUSED, "d64", {"qk_prefetch": True, "accumulator_init": "interleaved"}, None),
        (FUSED, "d64-causal", {"stagger_warpgroups": False}, None),
        (FUSED, "d64-varlen", {"heads_per_group": 4}, None),
        (FUSED, "d64-varlen", {"persistent": False}, "producer"),
        (FUSED, "d64-varlen", {"dq_conversion": "tiles"}, "not counted"),
        (FUSED, "d64-causal", {"qk_prefetch": True, "accumulator_init": "interleaved"}, "spill"),
        (FUSED, "d64", {"qk_prefetch": True, "accumulator_init": "upfront"}, "long before"),
        (FUSED, "d128", {"qk_prefetch": True, "accumulator_init": "interleaved"}, "more than 64 columns"),
        (SPLIT, "d256", {"q_stages": 3}, "shared memory"),
        (SPLIT, "d256", {"dq_block_n": 128}, "shared memory"),
        (SPLIT, "d128", {"dq_block_n": 64}, "128 keys"),
        (SPLIT, "d192", {"split_d": True}, None),
        (SPLIT, "d64-dv136", {"split_d": True}, None),
        (SPLIT, "d128", {"split_d": True}, "no smaller in two parts"),
        (SPLIT, "d200", {"split_d": True}, "no smaller in two parts"),
        (SPLIT, "d192", {"split_d": True, "heads_per_tile": 1}, "lie in one part"),
    ],
)
def test_restrictions_name_their_reason(
    row: KernelFamily, key: str, change: dict[str, KnobValue], reason: str | None
) -> None:
    spec = spec_of(f"bf16-{key}")
    found = families.invalid(row.default(spec, H200).replace(**change), spec, H200)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("key", "device", "reason"),
    [
        ("bf16-d128", "a100", "sm90"),
        ("tf32-d128", "h200", "tf32"),
        ("bf16-d36", "h200", "head_dim"),
        ("bf16-d128-unaligned", "h200", "16 bytes"),
        ("bf16-d128-dropout", "h200", "dropout"),
        ("bf16-d128-keybias", "h200", "bias"),
        ("bf16-d128-mask", "h200", "mask"),
        ("bf16-d128-page16", "h200", "paged"),
        ("bf16-d128-keybias-varlen", "h200", "bias"),
        ("bf16-d128-mask-varlen", "h200", "mask"),
    ],
)
def test_the_portable_families_serve_the_rest(key: str, device: str, reason: str) -> None:
    found = families.reasons(spec_of(key), find_device(device))
    assert all(reason in str(found[row.id]) for row in BOTH)


def test_no_config_takes_more_named_barriers_than_triton_leaves() -> None:
    left = NAMED_BARRIERS - FIRST_NAMED_BARRIER
    most = 0
    for key in ("d64", "d128", "d256"):
        spec = spec_of(f"bf16-{key}")
        for row in BOTH:
            for config in search_space(row, spec, H200):
                found = hopper_backward_resources.named_barriers(spec, config)
                assert sum(hopper_backward_resources.dq_named_barriers(config).values()) <= left
                most = max(most, sum(found.values()))
    assert most == left


def test_older_configs_mean_the_order_that_they_were_rendered_with() -> None:
    spec = spec_of("bf16-d64")
    together = FUSED.default(spec, H200).replace(stagger_warpgroups=False)
    older = Config.of(
        FUSED.id, {name: value for name, value in together.knobs if name not in ("stagger_warpgroups", "qk_prefetch")}
    )
    assert families.validate(older) == together
    text = render(spec, older).text
    assert text == render(spec, together).text
    assert "stagger_warpgroups" not in text
    staggered = render(spec, together.replace(stagger_warpgroups=True)).text
    # the warpgroup that is ahead meets the other one at the beginning of a step, and has one sum of dq left at the end
    assert staggered.count("_meet()") == text.count("_meet()") + 3
    assert "_sum_last(wg" in staggered


def test_heads_are_in_two_parts_by_default_and_were_in_one() -> None:
    """A config that is older than the knob, and one of heads of other sizes, has all columns at once."""
    spec = spec_of("bf16-d192")
    parts = SPLIT.default(spec, H200)
    whole = parts.replace(split_d=False)
    older = Config.of(SPLIT.id, {name: value for name, value in whole.knobs if name != "split_d"})
    assert render(spec, older).text == render(spec, whole).text != render(spec, parts).text


@EXHAUSTIVE
def test_heads_in_two_parts_take_three_quarters_of_the_products() -> None:
    spec = spec_of("bf16-d192")
    parts = SPLIT.default(spec, H200)
    whole = parts.replace(split_d=False)
    columns = {
        config: [
            sum(int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", part.handle.asm["ptx"]))
            for part in compile_kernel(spec, config, H200).parts[1:]
        ]
        for config in (whole, parts)
    }
    assert [4 * count for count in columns[parts]] == [3 * count for count in columns[whole]]


SIZES = Sizes(batch=3, nheads=8, nheads_k=2, seqlen_q=300, seqlen_k=1000)


def test_scratch_memory_is_padded_to_whole_query_blocks() -> None:
    for key, rows in (("d64", 384), ("d128", 320)):
        spec = spec_of(f"bf16-{key}")
        default = FUSED.default(spec, H200)
        found = {piece.name: piece.shape for piece in FUSED.scratch(spec, default, SIZES)}
        assert found["neg_delta"] == found["lse_start"] == (3, 8, rows)
        assert found["dq_acc"] == (3 * 8 * rows * spec.head_dim // 32, 32)
        assert "tiles_done" not in found
        tiles = FUSED.scratch(spec, default.replace(dq_conversion="tiles"), SIZES)
        assert {piece.name: piece.shape for piece in tiles}["tiles_done"] == (24,)
        split = SPLIT.scratch(spec, SPLIT.default(spec, H200), SIZES)
        assert {piece.name for piece in split} == {"neg_delta", "lse_start"}


def test_packed_sequences_have_whole_blocks_of_their_own() -> None:
    spec = spec_of("bf16-d128-varlen")
    config = FUSED.default(spec, H200)
    sizes = Sizes(
        batch=1, nheads=8, nheads_k=2, seqlen_q=900, seqlen_k=950, sequences=5, max_seqlen_q=400, max_seqlen_k=500
    )
    blocks = 900 // 64 + 5 + 1
    found = {piece.name: piece.shape for piece in FUSED.scratch(spec, config, sizes)}
    assert found["neg_delta"] == (1, 8, 900)  # by row, for gradients that need no kernel
    assert found["lse_start"] == found["dp_start"] == (1, 8, blocks * 64)
    assert found["dq_acc"] == (8 * blocks * 64 * 128 // 32, 32)
    prepare, main, finish = (kernel.programs(H200, sizes) for kernel in FUSED.kernels(spec, config))
    assert (prepare, main, finish) == (8 * blocks * 2, 2 * (950 // 128 + 5 + 1), 8 * blocks * 2)
    *_, dq = SPLIT.kernels(spec, SPLIT.default(spec, H200))
    assert dq.programs(H200, sizes) == 8 * (900 // 128 + 5 + 1)


def test_programs_cover_every_tile() -> None:
    spec = spec_of("bf16-d128")
    config = FUSED.default(spec, H200).replace(persistent=False)
    prepare, main, finish = (kernel.programs(H200, SIZES) for kernel in FUSED.kernels(spec, config))
    assert (prepare, main, finish) == (3 * 8 * 320 // 32, 3 * 2 * 8, 3 * 8 * 5 * 2)
    large = Sizes(batch=8, nheads=16, nheads_k=16, seqlen_q=2048, seqlen_k=2048)
    persistent = FUSED.kernels(spec, config.replace(persistent=True))[1]
    assert persistent.programs(H200, large) == H200.num_sms
    wide = spec_of("bf16-d256")
    _, dkdv, dq = SPLIT.kernels(wide, SPLIT.default(wide, H200).replace(persistent=False))
    assert (dkdv.programs(H200, SIZES), dq.programs(H200, SIZES)) == (3 * 2 * 16, 3 * 8 * 3)


@pytest.mark.parametrize(
    ("heads", "blocks", "parts", "group"),
    [(128, 4, 1, 1), (128, 4, 1, 8), (16, 128, 32, 8), (5, 3, 2, 8), (1, 1, 1, 1), (300, 1, 1, 1), (33, 8, 2, 16)],
)
def test_every_head_is_converted_once_all_of_its_tiles_have_started(
    heads: int, blocks: int, parts: int, group: int
) -> None:
    """A program waits for the tiles of a head: those must have been fetched before, or nobody would ever run them."""
    causal = "-causal" if group > 1 else ""
    spec = spec_of(f"bf16-d128{causal}")
    config = FUSED.default(spec, H200).replace(dq_conversion="tiles", heads_per_group=group)
    plan = gluon_function(render(spec, config).text, "_plan")
    keys, converted = [], []
    for tile in range(heads * (blocks + parts)):
        is_key, key_tile, head, part = plan(tile, 1, heads, 1, 8 * 64 * parts, 128 * blocks)
        if is_key:
            keys.append(key_tile)
        else:
            # heads of a group have their tiles in turn
            assert len(keys) >= min((head // group + 1) * group, heads) * blocks
            converted.append((head, part))
    assert keys == list(range(heads * blocks))
    assert sorted(converted) == [(head, part) for head in range(heads) for part in range(parts)]


def gluon_function(text: str, name: str) -> Any:
    """A function of a rendered kernel that has only integers, in plain Python."""
    source = re.search(rf"def {name}\(.*?\n\n\n", text, re.DOTALL)
    assert source is not None
    constants = dict(re.findall(r"^([A-Z_]+) = gl.constexpr\((\d+)\)$", text, re.MULTILINE))
    gl = SimpleNamespace(
        cdiv=lambda a, b: -(-a // b), minimum=min, where=lambda condition, yes, no: yes if condition else no
    )
    scope: dict[str, Any] = {"gl": gl, **{key: int(value) for key, value in constants.items()}}
    exec(source[0], scope)
    return scope[name]


@pytest.mark.parametrize(
    ("row", "key", "changes"),
    only(
        [
            (FUSED, "bf16-d128-causal", {}),
            (FUSED, "fp16-d64-window-offset", {"dq_conversion": "tiles"}),
            (FUSED, "bf16-d64", {"qk_prefetch": True, "accumulator_init": "interleaved"}),
            (FUSED, "bf16-d80-causal", {"stagger_warpgroups": False}),
            (SPLIT, "fp16-d256-causal-offset", {}),
            (SPLIT, "bf16-d96-dv64", {"persistent": False}),
            (SPLIT, "bf16-d192-causal", {"split_d": True}),
            (FUSED, "bf16-d128-causal-varlen", {}),
        ],
        (FUSED, "bf16-d128-causal", {}),
    ),
)
def test_kernels_compile_without_serialised_products(
    row: KernelFamily, key: str, changes: dict[str, KnobValue]
) -> None:
    spec = spec_of(key)
    config = row.default(spec, H200).replace(**changes)
    assert families.invalid(config, spec, H200) is None
    kernel = compile_kernel(spec, config, H200)
    for part in kernel.parts:
        assert trailing_pointers(ptx_sizes(part.handle.asm["ptx"]), part.kernel.parameters) == 2
        if part.kernel.language == "gluon":
            code = disassembled(part.handle.asm["cubin"])
            assert code.count("WARPGROUP.DEPBAR") * 4 < code.count("HGMMA")
            assert (part.num_warps, part.occupancy(H200)) == (12, 1)
        else:
            assert part.spills == 0
    assert kernel.spills <= hopper_backward_resources.TOLERATED_SPILLS
    check_shared_memory(spec, config, kernel)
    check_named_barriers(kernel)


def check_shared_memory(spec: Specialization, config: Config, kernel: CompiledKernel) -> None:
    shared = [part.shared_bytes for part in kernel.parts if part.kernel.language == "gluon"]
    expected = [hopper_backward_resources.main_bytes(spec, config)]
    if config.family == SPLIT.id:
        v_stages = hopper_backward_resources.dq_v_stages(spec, config, H200)
        expected.append(hopper_backward_resources.dq_bytes(spec, config, v_stages))
    assert all(actual <= limit < actual + 2048 for actual, limit in zip(shared, expected, strict=True))


def check_named_barriers(kernel: CompiledKernel) -> None:
    """Triton's own are those before the first that the kernels take."""
    for part in kernel.parts:
        if part.kernel.language == "gluon":
            ids = {int(number) for number in re.findall(r"\bbar(?:rier)?\.sync\S*\s+(\d+)", part.handle.asm["ptx"])}
            assert ids
            assert max(ids) < FIRST_NAMED_BARRIER


def test_every_variant_is_formatted_and_unpacks_what_it_packs(tmp_path: Path) -> None:
    keys = ("d64", "d128-causal", "d96-dv64-causal-window-offset", "d256-offset-window", "d192-dv128-causal")
    for key in (*keys, "d64-varlen", "d256-window-varlen"):
        spec = spec_of(f"fp16-{key}")
        for row in BOTH:
            space = search_space(row, spec, H200)
            for config in space[:: max(1, len(space) // 6)]:
                source = render(spec, config)
                (tmp_path / f"{source.module}.py").write_text(source.text)
                packed = re.search(r"    barriers = \((.*)\)", source.text)
                assert packed is not None
                assert source.text.count(f"    {packed[1]} = barriers") >= 2
    assert_passes(tmp_path, *FORMAT)
