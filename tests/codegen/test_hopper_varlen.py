"""Packed sequences in the Hopper families without a GPU: which tile is whose, where TMA clips, and who serves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flashgen.codegen import families
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.score_mods import ScoreMods
from flashgen.core.workload import Specialization
from flashgen.launch.geometry import CLIPPED_ROWS, clipped
from scripts.machine_loops import disassembled, local_accesses
from tests.codegen.gluon_stub import Numbers, functions
from tests.codegen.goldens import DOCUMENT
from tests.tiers import EXHAUSTIVE, only

H200 = find_device("h200")
PARTS = ("_add", "_blocks_of", "_count_blocks", "_find_sequence", "_rows_of", "_locate")


def ends_of(lengths: Sequence[int]) -> Numbers:
    return Numbers(values=[0, *itertools.accumulate(lengths)])


@pytest.mark.parametrize(
    "key",
    only(["fwd-bf16-d64-varlen", "fwd-bf16-d128-causal-varlen"], "fwd-bf16-d128-causal-varlen"),
    ids=["given", "heavy first"],
)
def test_tiles_are_the_blocks_of_all_sequences(key: str) -> None:
    spec = Specialization.parse(key)
    source = render(spec, HOPPER_FORWARD.default(spec, H200))
    count_blocks, locate = functions(source, *PARTS)[2::3]
    block = {"fwd-bf16-d64-varlen": 192}.get(key, 128)
    draw = random.Random(0)
    for _ in range(6):
        sequences, nheads = draw.choice((0, 1, 3, 31, 32, 33, 70)), draw.choice((1, 3, 6))
        queries = [draw.choice((0, 0, 1, block - 1, block, block + 1, 5 * block)) for _ in range(sequences)]
        keys = [draw.choice((0, 1, 300)) for _ in range(sequences)]
        used = [draw.randint(0, n) for n in queries]
        spare = draw.choice((0, 1, block, 3 * block + 1))
        total_q, total_k = sum(queries) + spare, sum(keys) + spare
        of_q, of_k = ends_of(queries), ends_of(keys)
        lengths = (of_q, of_k, Numbers(values=used), of_k, 1, 0, sequences, total_q, total_k)
        tiles = int(count_blocks(of_q, sequences, total_q, block)) * nheads
        expected: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for b, rows in enumerate([*queries, spare]):
            wanted, columns = ([*used, 0][b], [*keys, 0][b])
            for m, h in itertools.product(range(-(-rows // block)), range(nheads)):
                seen = columns if m * block < wanted else 0
                expected[b, m, h] = (sum(queries[:b]), rows, wanted, sum(keys[:b]), seen)
        # a program's tiles rise, but for those that it computes again
        order = [tile for start in range(5) for tile in range(start, tiles, 5) for tile in (tile, max(tile - 5, start))]
        found: dict[tuple[int, int, int], tuple[int, ...]] = {}
        first, before = 0, 0
        at = {}
        for tile in order:
            row, h, b, *place, first, before = locate(tile, tiles, first, before, lengths, (nheads, 1))
            found[int(b), int(row) // block, int(h)] = tuple(map(int, place))
            at[tile] = (int(b), int(row) // block, int(h))
        assert found == expected
        assert len(set(at.values())) == tiles
        if "causal" in key:  # most keys first
            assert all(
                a[1] >= c[1]
                for a, c in itertools.pairwise(at[tile] for tile in range(tiles))
                if a[0] == c[0] and a[2] == c[2]
            )


def test_wrong_lengths_stay_within_the_tensors() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal-varlen")
    count_blocks, locate = functions(render(spec, HOPPER_FORWARD.default(spec, H200)), *PARTS)[2::3]
    draw = random.Random(1)
    for _ in range(20):
        sequences, total = draw.choice((1, 5, 40)), draw.choice((1, 1000))
        wrong = [Numbers(values=[draw.randint(-9, 2 * total) for _ in range(sequences + 1)]) for _ in range(4)]
        tiles = int(count_blocks(wrong[0], sequences, total, 128))
        assert 0 <= tiles <= total // 128 + sequences + 1
        first, before = 0, 0
        for tile in range(tiles):
            found = locate(tile, tiles, first, before, (*wrong, 1, 1, sequences, total, total), (1, 1))
            _, _, _, q_start, q_rows, seqlen_q, k_start, seqlen_k, first, before = map(int, found)
            assert 0 <= seqlen_q <= q_rows <= total - q_start <= total
            assert 0 <= seqlen_k <= total - k_start <= total


def test_tma_clips_behind_any_row() -> None:
    draw = random.Random(2)
    for _ in range(2000):
        rows, heads = draw.randint(1, 1 << 20), draw.randint(1, 64)
        step = draw.choice((heads * 128, 3 * heads * 128, 128, 8 * draw.randint(1, 1 << 20)))
        shape, strides = clipped((1, heads, rows, 128), (16, 128, step, 1))
        start = draw.randrange(rows)
        length = draw.randint(0, rows - start)
        row, head = draw.randint(0, length + 300), draw.randrange(heads)
        place = (CLIPPED_ROWS, start + length, head, CLIPPED_ROWS - length + row, 0)
        for size in (1, 2, 4):  # bytes of an element, in addresses of 64 bits
            address = size * sum(a * b for a, b in zip(place, strides, strict=True))
            assert address % (1 << 64) == size * ((start + row) * step + head * 128)
        assert all(0 <= at < most for at, most in zip(place, shape, strict=True)) == (row < length)
        assert all(0 < 2 * step < 1 << 40 and step % 8 == 0 for step in strides[:-1])
        assert max(shape) < 1 << 31


def test_the_family_serves_packed_sequences_first() -> None:
    for key in ("fwd-bf16-d128-causal-varlen", "fwd-fp16-d64-varlen"):
        spec = Specialization.parse(key)
        assert [row.id for row in families.applicable(spec, H200)] == ["hopper_forward", "portable_forward"]
        assert families.default_config(spec, H200).family == "hopper_forward"
    for page, family, block_n in (
        (8, "hopper_forward", 128),
        (64, "hopper_forward", 128),
        (256, "hopper_forward", 128),
        (192, "hopper_forward", 64),  # three steps of a page each
        (4, "portable_forward", 128),
        (24, "portable_forward", 128),
    ):
        paged = replace(Specialization.parse("fwd-bf16-d128-causal-varlen"), page_size=page)
        config = families.default_config(paged, H200)
        assert config.family == family
        assert family == "portable_forward" or config["block_n"] == block_n
        for each in HOPPER_FORWARD.seed_configs(paged, H200) if family == "hopper_forward" else ():
            assert HOPPER_FORWARD.invalid(paged, each, H200) is None


def test_what_packed_sequences_leave_of_the_family() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal-varlen")
    config = HOPPER_FORWARD.default(spec, H200)
    functions = replace(spec, mods=ScoreMods(mask_mod=DOCUMENT, aux=("i32", "fp32")))
    packed = HOPPER_FORWARD.invalid(functions, HOPPER_FORWARD.default(functions, H200).replace(packed_heads=4), H200)
    assert packed is not None
    assert "asked about one head" in packed
    small = {"warpgroups": 1, "blocks_per_sm": 2, "block_n": 64, "ping_pong": False, "exp_order": "free"}
    assert HOPPER_FORWARD.invalid(spec, config.replace(**small, masked_blocks="one"), H200) is not None
    few = Sizes(batch=1, nheads=8, nheads_k=1, seqlen_q=5, seqlen_k=900, sequences=5, max_seqlen_q=1, max_seqlen_k=300)
    assert HOPPER_FORWARD.fitted(spec, config, few, H200) == config
    (kernel,) = HOPPER_FORWARD.kernels(spec, config)
    assert kernel.programs(H200, few) == min((min(5 // 128 + 5, 5) + 1) * 8, 132)
    for each in (config, *HOPPER_FORWARD.seed_configs(spec, H200)):
        assert HOPPER_FORWARD.invalid(spec, each, H200) is None
    bias: Any = families.unsupported(HOPPER_FORWARD, Specialization.parse("fwd-bf16-d128-bias-varlen"), H200)
    assert "no bias" in bias


@EXHAUSTIVE
def test_the_mainloop_is_the_dense_one() -> None:
    texts = {}
    for key in ("fwd-bf16-d128", "fwd-bf16-d128-varlen"):
        spec = Specialization.parse(key)
        compiled = compile_kernel(spec, HOPPER_FORWARD.default(spec, H200), H200)
        texts[key] = disassembled(compiled.handle.asm["cubin"])
        assert local_accesses(texts[key])["mainloop"] == (0, 0)
    dense, packed = texts.values()
    for opcode in ("HGMMA", "WARPGROUP", "UTMALDG", "UTMASTG"):  # a wait more would be a product that waits for another
        assert dense.count(f" {opcode}") == packed.count(f" {opcode}") > 0
