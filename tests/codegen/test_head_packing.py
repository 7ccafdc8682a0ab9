"""Packed heads: how many, which tile computes which rows, and what the family and its kernels make of them."""

from __future__ import annotations

import ast
import csv
import itertools
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.codegen import families
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.common_wgmma import descriptor_type
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_packing import (
    PACKED_HEADS,
    SEQUENCE_HEADS,
    as_group_allows,
    packing,
    packing_of_sequences,
    poor_at_sizes,
    tiles,
)
from flashgen.codegen.hopper_forward import resources as hopper_resources
from flashgen.codegen.hopper_forward import tile_choice
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.hopper_forward.tiles import TILES
from flashgen.codegen.render import render
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.parameters import ptx_sizes, trailing_pointers
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.packed_ladder import PackedSizes
from flashgen.tuning.candidates import Candidates
from scripts.crosscompile_jobs import ONE_WARPGROUP
from tests.codegen.ruff import FORMAT, assert_passes
from tests.tiers import EXHAUSTIVE, first

H200 = find_device("h200")


def sizes(seqlen_q: int, group: int, nheads_k: int = 8, batch: int = 1) -> Sizes:
    return Sizes(batch=batch, nheads=group * nheads_k, nheads_k=nheads_k, seqlen_q=seqlen_q, seqlen_k=1000)


def packed(key: str, heads: int, **changes: int | str | bool) -> tuple[Specialization, Config]:
    spec = Specialization.parse(key)
    config = HOPPER_FORWARD.default(spec, H200).replace(packed_heads=heads, **changes)
    return spec, config.replace(masked_blocks="branch", hidden_blocks="computed") if spec.causal else config


@pytest.mark.parametrize(
    ("seqlen_q", "group", "heads"),
    [
        (1, 1, 1),
        (1, 4, 4),
        (1, 8, 8),
        (1, 7, 8),  # seven heads fill seven eighths of one tile, or two tiles by fours
        (1, 40, 16),
        (8, 16, 16),
        (9, 16, 8),
        (16, 4, 4),
        (64, 4, 2),
        (65, 4, 4),  # three tiles where two packs or four heads took four
        (100, 4, 1),
        (128, 8, 1),
        (8192, 8, 1),
        (0, 4, 1),
    ],
)
def test_heads_are_packed_as_far_as_it_saves_tiles(seqlen_q: int, group: int, heads: int) -> None:
    assert packing(sizes(seqlen_q, group), rows=128) == heads


def test_no_other_packing_has_fewer_tiles_unless_little_is_saved() -> None:
    for seqlen_q, group, rows in itertools.product((1, 3, 16, 17, 63, 64, 130, 300), (1, 2, 3, 8, 12), (64, 192)):
        case = sizes(seqlen_q, group)
        chosen, fewest = packing(case, rows), min(tiles(case, rows, heads) for heads in PACKED_HEADS)
        assert tiles(case, rows, chosen) == fewest or (chosen == 1 and fewest > 0.75 * tiles(case, rows, 1))


def test_what_computes_twice_the_tiles_is_unfit() -> None:
    assert "computes 32 tiles, where 8" in str(poor_at_sizes(sizes(1, 4), 128, 1))
    assert poor_at_sizes(sizes(1, 4), 128, 4) is None
    assert poor_at_sizes(sizes(1, 4), 128, 8) is None, "rows that stay empty cost nothing where there is room"
    assert "computes 32 tiles, where 8" in str(poor_at_sizes(sizes(128, 1), 128, 4))
    assert poor_at_sizes(sizes(4096, 8), 128, 1) is None
    assert poor_at_sizes(sizes(0, 1), 128, 1) is None, "nothing is as much work in any packing"


@pytest.mark.parametrize(
    ("group", "most"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (7, 1), (8, 8), (12, 4), (15, 1), (16, 16), (71, 1)]
)
def test_packs_of_sequences_divide_a_group(group: int, most: int) -> None:
    case = sizes(100, group)
    assert as_group_allows(case, 16) == most
    for heads in PACKED_HEADS:
        assert as_group_allows(case, heads) == min(heads, most)


def test_heads_of_short_sequences_are_packed() -> None:
    def of(rows: int, group: int = 4) -> int:
        return packing_of_sequences(sizes(64 * rows, group)._replace(sequences=64, max_seqlen_q=4 * rows))

    assert [of(rows) for rows in (1, 33, 1024, 1025, 4096)] == [4, 4, 4, 1, 1]
    assert [of(33, group) for group in (1, 2, 3, 7, 8, 64)] == [1, 2, 1, 1, 8, 8]


def test_packed_sequences_are_searched_with_heads_side_by_side() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal-varlen")
    assert HOPPER_FORWARD.allowed_values(spec)["packed_heads"] == SEQUENCE_HEADS
    dense = Specialization.parse("fwd-bf16-d128-causal")
    assert HOPPER_FORWARD.allowed_values(dense)["packed_heads"] == (1,)
    for text, counts in (
        ("b64-h32-hk8-tq16384-s2048-d128-causal-varlen", {1, 2, 4}),
        ("b64-h12-tq16384-s2048-d128-causal-varlen", {1}),
        ("b64-h24-hk4-tq16384-s2048-d128-causal-varlen", {1, 2}),
        ("b64-h28-hk4-tq16384-s2048-d128-causal-varlen", {1}),
        ("b64-h32-hk2-tq16384-s2048-d128-causal-varlen", {1, 2, 4, 8}),
    ):
        found = Candidates.of(Workload.parse(text), H200, (HOPPER_FORWARD.id,)).spaces[0].configs
        assert {config["packed_heads"] for config in found} == counts, text
        assert all(families.invalid(config, spec, H200) is None for config in found[::40])
    starts = HOPPER_FORWARD.seed_configs(spec, H200)
    assert {config["packed_heads"] for config in starts} == {1, 4}


@pytest.mark.parametrize("key", ["fwd-bf16-d128-causal-varlen", "fwd-bf16-d64-varlen"])
def test_a_config_for_other_sequences_is_packed_as_these_ask_for(key: str) -> None:
    spec = Specialization.parse(key)
    default = HOPPER_FORWARD.default(spec, H200)
    for rows, group, heads in ((128, 4, 4), (8192, 4, 1), (128, 1, 1), (32, 8, 8)):
        case = sizes(32 * rows, group)._replace(sequences=32, max_seqlen_q=2 * rows, max_seqlen_k=2 * rows)
        found = families.balanced(default, spec, case, H200)
        assert found["packed_heads"] == heads
        assert families.invalid(found, spec, H200) is None
        again = families.balanced(found, spec, case, H200)
        assert again["packed_heads"] == heads
        for one in (found, again):
            assert one == default or one in families.beside(default, spec, H200)
    packed = families.balanced(default, spec, sizes(4096, 4)._replace(sequences=64, max_seqlen_q=256), H200)
    assert families.fitted(packed, spec, sizes(64, 1), H200)["packed_heads"] == 1, "of a group of one none are packed"


@pytest.mark.parametrize("key", ["fwd-bf16-d128-causal-varlen", "fwd-bf16-d64-varlen", "fwd-bf16-d64-causal-varlen"])
@pytest.mark.parametrize("changes", [{}, {"heads_per_group": 16}, {"packed_heads": 4, "heads_per_group": 8}])
def test_what_is_packed_is_beside_every_tile(key: str, changes: dict[str, int]) -> None:
    """One that stays has what goes with the tile, as others have."""
    spec = Specialization.parse(key)
    for tile in TILES[spec.head_dim, spec.causal]:
        config = tile_choice.with_tile(spec, HOPPER_FORWARD.default(spec, H200), tile, H200)
        config = config.replace(**changes if spec.causal else {**changes, "heads_per_group": 1})
        if families.invalid(config, spec, H200) is None:
            able = {config, *families.beside(config, spec, H200)}
            for rows, group in itertools.product((32, 128, 400, 900), (2, 4, 8, 24)):
                case = sizes(32 * rows, group)._replace(sequences=32, max_seqlen_q=2 * rows, max_seqlen_k=2 * rows)
                assert families.balanced(config, spec, case, H200) in able


def test_what_is_packed_is_near_the_best_of_races() -> None:
    """Batches of sequences of 32 to 1024 tokens in the mean, two to eight heads a group; ms of profiles of lengths."""
    races: dict[str, dict[tuple[int, ...], float]] = {}
    with (Path(__file__).parent / "packed_sequences_nvidia_h200.csv").open() as file:
        for row in csv.DictReader(file):
            times = [float(each.partition("=")[2]) for each in row["profile_ms"].split()]
            found = races.setdefault(row["workload"], {})
            tile = tuple(int(row[name]) for name in ("warpgroups", "block_n", "blocks_per_sm", "packed_heads"))
            found[tile] = min(found.get(tile, math.inf), statistics.geometric_mean(times))
    chosen, alone = [], []
    for key, found in races.items():
        workload = Workload.parse(key)
        spec, best = specialization(workload), min(found.values())
        case = PackedSizes.of(workload).largest.packed
        config = families.balanced(HOPPER_FORWARD.default(spec, H200), spec, case, H200)
        tile = [config.integer(name) for name in ("warpgroups", "block_n", "blocks_per_sm", "packed_heads")]
        if tuple(tile) in found:  # not the one of heads that cannot be packed
            chosen.append(found[tuple(tile)] / best)
        alone.append(min(time for each, time in found.items() if each[-1] == 1) / best)
    assert (len(races), len(chosen)) == (12, 11)
    assert statistics.geometric_mean(chosen) < 1.006
    assert max(chosen) < 1.04
    assert statistics.geometric_mean(alone) > 1.09


@pytest.mark.parametrize("key", ["d64", "d128-causal-window", "d192-dv128", "d256-softcap-offset"])
def test_values_that_are_not_enumerated_are_never_valid(key: str) -> None:
    spec, drawn = Specialization.parse(f"fwd-bf16-{key}"), random.Random(0)
    choices = HOPPER_FORWARD.allowed_values(spec)
    by_sizes = {"packed_heads", "split_keys"}
    assert (choices["packed_heads"], choices["split_keys"]) == ((1,), (False,)), "which the sizes decide"
    default, left_out = HOPPER_FORWARD.default(spec, H200), 0
    for _ in range(400):
        knob = drawn.choice([knob for knob in HOPPER_FORWARD.knobs if knob.name not in by_sizes])
        other = drawn.choice([knob for knob in HOPPER_FORWARD.knobs if knob.name in choices.keys() - by_sizes])
        changes = {each.name: drawn.choice(each.values) for each in (knob, other)}
        if any(value not in choices.get(name, (value,)) for name, value in changes.items()):
            left_out += 1
            assert families.invalid(default.replace(**changes), spec, H200) is not None, changes
    assert left_out > 50


@pytest.mark.parametrize("key", ["d64-causal", "d128", "d128-causal-window", "d256-causal-offset", "d192-dv128-alibi"])
def test_a_default_is_fitted_to_short_queries_and_back(key: str) -> None:
    spec = Specialization.parse(f"fwd-bf16-{key}")
    default = HOPPER_FORWARD.default(spec, H200)
    short = families.fitted(default, spec, sizes(1, 8), H200)
    assert short["packed_heads"] == 8
    assert families.invalid(short, spec, H200) is None
    assert families.fitted(short, spec, sizes(1, 8), H200) is short
    back = families.fitted(short, spec, sizes(4096, 8), H200)
    assert back["packed_heads"] == 1
    assert families.invalid(back, spec, H200) is None
    assert families.fitted(default, spec, sizes(4096, 8), H200) is default


@pytest.mark.parametrize("key", ["d128-keybias", "d128-causal-keymask"])
def test_heads_with_a_bias_or_a_mask_are_not_packed(key: str) -> None:
    spec, config = packed(f"fwd-bf16-{key}", 4)
    assert "different biases or masks" in str(families.invalid(config, spec, H200))
    default = HOPPER_FORWARD.default(spec, H200)
    assert families.fitted(default, spec, sizes(1, 8), H200) is default


def test_packed_query_blocks_are_not_cut_along_the_diagonal() -> None:
    spec, config = packed("fwd-bf16-d128-causal", 4)
    assert "diagonal" in str(families.invalid(config.replace(masked_blocks="one"), spec, H200))


def test_a_config_of_one_head_a_tile_says_nothing_of_packing() -> None:
    """Records that are older than the knob keep their digests."""
    spec = Specialization.parse("fwd-bf16-d128-causal")
    config = HOPPER_FORWARD.default(spec, H200)
    older = Config.of(config.family, {name: value for name, value in config.knobs if name != "packed_heads"})
    assert families.validate(older) == config
    text = render(spec, config).text
    assert "packed" not in text.lower()
    assert "packed_heads=4" in render(*packed("fwd-bf16-d128-causal", 4)).text


def test_query_tiles_have_an_axis_for_the_heads_of_a_group() -> None:
    spec, config = packed("fwd-bf16-d192-dv128-causal", 8, split_d=True)
    types = {parameter.name: parameter.type for parameter in HOPPER_FORWARD.parameters(spec, config)}
    block_n = config["block_n"]
    assert types["q_desc"].startswith("tensordesc<bf16[1, 1, 8, 8, 128],")
    assert types["q1_desc"].startswith("tensordesc<bf16[1, 1, 8, 8, 64],")
    assert types["o_desc"].startswith("tensordesc<bf16[1, 1, 8, 8, 128],")
    assert types["k_desc"].startswith(f"tensordesc<bf16[1, 1, {block_n}, 128],")
    gl = pytest.importorskip("triton.experimental.gluon.language")
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 16, 4, 64], gl.bfloat16)
    assert descriptor_type("bf16", 16, 4, 64) == f"tensordesc<bf16[1, 1, 16, 4, 64],{layout!r}>"


class Language:
    """What the schedule of a kernel takes from Gluon, for integers."""

    constexpr = staticmethod(lambda value: value)
    minimum, maximum = staticmethod(min), staticmethod(max)
    cdiv = staticmethod(lambda a, b: -(-a // b))


def schedule_of(spec: Specialization, config: Config) -> SimpleNamespace:
    """The functions and constants of a rendered kernel that say which rows a tile has, as Python."""
    wanted = ("_query_blocks", "_packs", "_schedule")
    constants = ("ROWS", "WARPGROUPS", "BLOCK_M", "PACKED_HEADS", "POSITIONS", "HEADS_PER_GROUP")
    body = []
    for node in ast.parse(render(spec, config).text).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            node.decorator_list = []
            body.append(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in constants:
            body.append(node)  # type: ignore[arg-type]
    names: dict[str, object] = {"gl": Language}
    exec(compile(ast.Module(body=body, type_ignores=[]), "schedule", "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("key", ["fwd-bf16-d128", "fwd-bf16-d64-causal"])
@pytest.mark.parametrize(("batch", "nheads_k", "group", "seqlen_q"), [(2, 3, 7, 5), (1, 2, 4, 65), (3, 1, 16, 1)])
def test_every_row_of_every_head_has_one_tile(key: str, batch: int, nheads_k: int, group: int, seqlen_q: int) -> None:
    for heads in (2, 4, 16):
        spec, config = packed(key, heads)
        schedule, case = schedule_of(spec, config), sizes(seqlen_q, group, nheads_k, batch)
        nheads = group * nheads_k
        count = schedule._query_blocks(seqlen_q) * schedule._packs(nheads, group) * batch
        assert count == tiles(case, hopper_resources.tile_rows(config), heads)
        kernel = HOPPER_FORWARD.kernels(spec, config)[0]
        assert kernel.programs(H200, case) == min(count, H200.num_sms * config.integer("blocks_per_sm"))
        found = []
        for tile in range(count):
            first_row, b, h_k, first_head = schedule._schedule(tile, count, nheads, group, seqlen_q)
            for wg, row in itertools.product(range(schedule.WARPGROUPS), range(schedule.ROWS)):
                position = first_row + wg * schedule.POSITIONS + row % schedule.POSITIONS
                head = first_head + row // schedule.POSITIONS
                if position < seqlen_q and head < group:
                    found.append((b, h_k, head, position))
        assert sorted(found) == list(itertools.product(range(batch), range(nheads_k), range(group), range(seqlen_q)))


def test_packed_kernels_are_formatted(tmp_path: Path) -> None:
    keys = (
        "d128",
        "d64-causal-sink-window-offset",
        "d256-softcap-alibi-sink",
        "d96-dv192-causal-window",
        "d128-varlen",
    )
    keys += ("d80-causal-sink-alibi-varlen", "d64-window-varlen")
    for key, stages in itertools.product(keys, (1, 2)):
        source = render(*packed(f"fwd-fp16-{key}", 4, q_stages=stages))
        (tmp_path / f"{source.module}.py").write_text(source.text)
    assert_passes(tmp_path, *FORMAT)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("key", "heads", "changes"),
    first(
        1,
        [
            ("fwd-bf16-d128-causal-alibi-sink-window", 4, ONE_WARPGROUP),
            ("fwd-fp16-d96", 16, {"split_d": True, "barriers": "mbarrier", "exp_order": "free", "q_stages": 2}),
        ],
    ),
)
def test_packed_kernels_compile_to_the_same_loop(key: str, heads: int, changes: dict[str, int | str | bool]) -> None:
    spec, config = packed(key, heads, **changes)
    assert families.invalid(config, spec, H200) is None
    kernel = compile_kernel(spec, config, H200)
    ptx = kernel.handle.asm["ptx"]
    assert trailing_pointers(ptx_sizes(ptx), HOPPER_FORWARD.parameters(spec, config)) == 2
    assert kernel.spills <= 72
    separate_o_smem = hopper_resources.separate_o_smem(spec, config, H200)
    assert kernel.shared_bytes <= hopper_resources.smem_bytes(spec, config, separate_o_smem=separate_o_smem)
    parts = len(hopper_resources.parts(spec.head_dim, config))
    boxes = -(-spec.head_dim // 64)  # one copy brings 128 bytes of a row
    assert parts <= ptx.count("cp.async.bulk.tensor.5d.shared") // config.integer("warpgroups") <= boxes
    assert "cp.async.bulk.tensor.5d.global" in ptx
