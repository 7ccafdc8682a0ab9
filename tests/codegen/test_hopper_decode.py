"""The Hopper decode family: its kernels whole on a modelled machine, what it serves, and what of an SM it takes."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flashgen.codegen.families import family, invalid, unsupported
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_decode.family import HOPPER_DECODE
from flashgen.codegen.hopper_decode.resources import consumer_registers, smem_needed
from flashgen.codegen.render import render
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.core.lengths import PROFILES
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.decode_numbers import DecodeNumbers
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from tests import tiers
from tests.codegen.gluon_machine import Machine, Pointer, kernel_of, storage
from tests.decoding import Case, assert_right, decode_config, make, only

H200 = find_device("h200")
SMALL = replace(H200, num_sms=3)
D64: dict[str, Any] = {"nheads": 4, "nheads_k": 2, "head_dim": 64, "dtype": torch.bfloat16}

SHARES: dict[str, KnobValue] = {"block_n": 32, "num_stages": 2, "slack": 0, "overhead": 0}
WHOLE: dict[str, KnobValue] = {**SHARES, "slack": 16, "overhead": 4, "slack_percent": 8}
GRID: dict[str, KnobValue] = {**SHARES, "schedule": "grid"}
MERGE: dict[str, KnobValue] = {"merge_rows": 4, "reduce_warps": 4, "partials": 8}
CHUNKS: dict[str, KnobValue] = {**GRID, "chunk": 1024, "min_tiles": 2, "early": True, **MERGE}
FEW_ROWS: dict[str, KnobValue] = {**WHOLE, "block_m": 8, "block_n": 64}
FEW_ROWS_GRID: dict[str, KnobValue] = {**GRID, "block_m": 16, "block_n": 64}

CASES = {
    "contiguous": Case(lens=(70, 0, 1, 200), **D64),
    "one sequence": Case(lens=(300,), **D64),
    "pages of 16": Case(lens=(70, 15, 16, 17, 33), page=16, **D64),
    "pages of 32": Case(lens=(31, 32, 33, 150), page=32, layout="hnd", **D64),
    "pages of 1": Case(lens=(0, 1, 40), page=1, **D64),
    "pages of 64": Case(lens=(63, 64, 65, 0), page=64, layout="interleaved", **D64),
    "queries of 3": Case(lens=(2, 3, 90, 0), page=16, seqlen_q=3, options={"causal": True}, **D64),
    "rows of two blocks": Case(
        lens=(40, 100), nheads=34, nheads_k=1, head_dim=64, seqlen_q=2, dtype=torch.bfloat16, options={"causal": True}
    ),
    "window and sinks": Case(lens=(3, 64, 150, 0), page=16, sinks=True, options={"window": (40, 0)}, **D64),
    "window": Case(lens=(140, 64, 150), options={"window": (40, 0)}, **D64),
    "left padding": Case(lens=(50, 100, 9), leftpad=(3, 99, 9), seqlen_q=2, options={"causal": True}, **D64),
    "rows of the cache": Case(lens=(50, 2, 0), batch_idx=(5, 0, 2), sinks=True, **D64),
    "fp16": Case(lens=(50, 70), nheads=3, nheads_k=1, head_dim=128, dtype=torch.float16),
}


def tensors(*axes: int, **given: Any) -> Iterator[torch.Tensor]:
    """A range whose numbers are tensors, as they are in a kernel."""
    return (torch.tensor(i) for i in range(*map(int, axes)))


def pointer(tensor: torch.Tensor) -> Pointer:
    memory = storage(tensor)
    return Pointer(memory=memory if memory.dtype.is_floating_point else memory.long(), place=tensor.storage_offset())


class Changing:
    """Lengths that another stream writes while a call runs: each read finds the next of some batches of them."""

    dtype = torch.int32

    def __init__(self, *batches: tuple[int, ...]) -> None:
        self._found = itertools.cycle([torch.tensor(lens) for lens in batches])
        self._lock = threading.Lock()
        self._batch = len(batches[0])

    def __len__(self) -> int:
        return self._batch

    def __getitem__(self, places: torch.Tensor) -> torch.Tensor:
        with self._lock:
            return next(self._found)[places]


def launched(
    call: DecodeCall, *, lens: Changing | None = None, **knobs: KnobValue
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE as both kernels compute them, from memory that holds NaN before."""
    out = empty_output(call.q, call.v_cache, bshd=True).fill_(math.nan)
    lse = empty_lse(call.q, bshd=True).fill_(math.nan)
    checked = CheckedDecode.of(replace(call, return_lse=True), out)
    spec, shape = checked.spec, checked.shape
    assert unsupported(HOPPER_DECODE, spec, H200) is None
    config = HOPPER_DECODE.default(spec, H200).replace(**knobs)
    if config["schedule"] == "grid":
        config = config.replace(slack=0, slack_percent=0, overhead=0)
    config = HOPPER_DECODE.fitted(spec, config, shape.sizes, H200)
    assert invalid(config, spec, H200) is None
    numbers = DecodeNumbers.of(shape, config, SMALL)
    values: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, int) else value for name, value in numbers.values(config).items()
    }
    values["num_pages"] = torch.tensor(call.k_cache.shape[0])
    wide = call.v_cache.shape[3]
    parts = torch.full((max(numbers.part_rows, 1), wide), math.nan), torch.full((max(numbers.part_rows, 1),), math.nan)
    given = {"O": out, "LSE": lse, "Q": call.q, "K": call.k_cache, "V": call.v_cache, "Lens": call.seqlens}
    given |= {"Table": call.block_table, "Leftpad": call.leftpad, "BatchIdx": call.batch_idx}
    given |= {"Sinks": call.features.sinks, "PartO": parts[0], "PartLse": parts[1]}
    memory = {name: pointer(call.seqlens if tensor is None else tensor) for name, tensor in given.items()}
    memory["Lens"] = memory["Lens"] if lens is None else Pointer(memory=cast("torch.Tensor", lens))
    text = render(spec, config).text
    kernels = HOPPER_DECODE.kernels(spec, config)
    for kernel, grid in zip(kernels, numbers.grids, strict=True):
        if grid:
            machine = Machine(math.prod(grid), grid=grid)
            arguments = [memory.get(name, values.get(name)) for name in kernel.names]
            run = machine.run if kernel.language == "gluon" else machine.run_each
            run(kernel_of(text, kernel.entry, machine, range=tensors), arguments)
    return out, lse


BY_DEFAULT = ("queries of 3", "window and sinks", "left padding", "rows of the cache")
"""All of pages, a causal mask, a window, sinks, and where keys begin."""


@pytest.mark.parametrize(
    "knobs",
    tiers.only([SHARES, WHOLE, GRID, CHUNKS, FEW_ROWS, FEW_ROWS_GRID], SHARES, GRID, FEW_ROWS),
    ids=["shares", "whole", "grid", "chunks", "few rows", "few rows, grid"],
)
@pytest.mark.parametrize("name", tiers.only(CASES, *BY_DEFAULT))
def test_it_is_right_and_reads_nothing_that_is_hidden(name: str, knobs: dict[str, KnobValue]) -> None:
    call = make(CASES[name])
    assert_right(call, *launched(call, **knobs))


@pytest.mark.parametrize("name", ["contiguous", "one sequence", "queries of 3", "rows of two blocks"])
def test_rows_that_are_merged_together_are_right(name: str) -> None:
    call = make(CASES[name])
    assert_right(call, *launched(call, **SHARES, **MERGE))


@pytest.mark.parametrize("schedule", tiers.first(1, ["shares", "grid"]))
def test_the_bits_of_a_sequence_follow_from_itself_alone(schedule: str) -> None:
    case = Case(lens=(300, 40, 129, 7), page=16, options={"fixed_split_size": 128}, **D64)
    knobs = SHARES if schedule == "shares" else GRID
    whole = make(case)
    out, lse = launched(whole, **knobs)
    assert_right(whole, out, lse)
    for page in (None, 32, 128):
        assert torch.equal(out, launched(make(replace(case, page=page)), **knobs)[0]), page
    for rows in ([2], [3, 2, 0]):
        same, same_lse = launched(only(whole, rows), **knobs)
        assert torch.equal(out[rows], same)
        assert torch.equal(lse[rows], same_lse)


@pytest.mark.parametrize("page", tiers.first(1, [None, 16]), ids=["contiguous", "pages"])
@pytest.mark.parametrize("splits", tiers.first(1, [None, 128]), ids=["equal shares", "splits of 128"])
@pytest.mark.parametrize("knobs", [SHARES, GRID], ids=["shares", "grid"])
def test_lengths_that_change_under_way_end_a_call(
    knobs: dict[str, KnobValue], splits: int | None, page: int | None
) -> None:
    options = {"fixed_split_size": splits} if splits else {}
    lens = Changing((300, 0, 40, 129, 7), (3, 200, 140, 0, 300), (64, 64, 0, 0, 1))
    call = make(Case(lens=(300, 300, 300, 300, 300), page=page, options=options, **D64))
    # what it computes has no meaning; every piece that producers find is one that the consumers were told of
    launched(call, lens=lens, **knobs)


# --- what it serves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "device", "reason"),
    [
        ("dec-bf16-d128", "a100", "it needs sm90, not sm80"),
        ("dec-bf16-d96", "h200", "its heads are of 64, 128 or 256, of K and of V, not 96 and 96"),
        ("dec-bf16-d128-unaligned", "h200", "it copies 16 bytes at a time, and rows begin anywhere"),
    ],
)
def test_what_it_does_not_serve_has_a_reason(key: str, device: str, reason: str) -> None:
    assert unsupported(HOPPER_DECODE, Specialization.parse(key), find_device(device)) == reason


@pytest.mark.parametrize("feature", ["softcap", "alibi", "offset"])
def test_features_that_it_lacks_are_left_to_the_portable_family(feature: str) -> None:
    spec = Specialization.parse(f"dec-bf16-d128-{feature}")
    assert unsupported(HOPPER_DECODE, spec, H200) is not None
    assert unsupported(family("portable_decode"), spec, H200) is None


@pytest.mark.parametrize("key", ["dec-bf16-d64", "dec-fp16-d128-page16", "dec-bf16-d256-page64-sink"])
def test_defaults_and_seeds_fit(key: str) -> None:
    spec = Specialization.parse(key)
    configs = (HOPPER_DECODE.default(spec, H200), *HOPPER_DECODE.seed_configs(spec, H200))
    assert [invalid(config, spec, H200) for config in configs] == [None] * len(configs)


def test_what_does_not_fit_is_refused_with_the_resource() -> None:
    spec = Specialization.parse("dec-bf16-d256")
    config = HOPPER_DECODE.default(spec, H200)
    assert "bytes of shared memory" in str(invalid(config.replace(block_n=128), spec, H200))
    assert "programs of" in str(invalid(config.replace(per_sm=2, block_n=64, num_stages=2), spec, H200))
    small = config.replace(block_n=32, num_stages=2)
    assert smem_needed(spec, small) == (2 * 2 * 32 + 2 * 64) * 256 * 2 + 1024
    assert smem_needed(spec, small.replace(per_sm=2)) == (2 * 2 * 32 + 64) * 256 * 2 + 1024
    assert [consumer_registers(config.replace(per_sm=n), H200) for n in (1, 2)] == [248, 176]
    assert "no use for chunk" in str(invalid(config.replace(schedule="shares", chunk=1024), spec, H200))


SIZES = {
    "few rows": (
        "dec-b16-h32-hk8-sk8192-d128",
        "hopper_decode",
        {"schedule": "shares", "block_m": 8, "block_n": 128, "overhead": 2},
    ),
    "few rows, short": ("dec-b16-h64-hk4-sk1024-d64", "hopper_decode", {"schedule": "grid", "block_m": 16}),
    "few rows, many": ("dec-b256-h32-hk8-sk512-d128", "hopper_decode", {"schedule": "grid", "per_sm": 2}),
    "few rows, wide": ("dec-b1-h32-hk8-sk512-d256", "hopper_decode", {"schedule": "shares", "num_stages": 3}),
    "seven rows": ("dec-b64-h28-hk4-sk8192-d128-page16", "hopper_decode", {"block_m": 8}),
    "one sequence": ("dec-b1-h32-hk8-sq16-sk8192-d128", "hopper_decode", {"schedule": "grid", "per_sm": 1}),
    "long": (
        "dec-b16-h32-hk8-sq16-sk8192-d128",
        "hopper_decode",
        {"schedule": "shares", "block_n": 64, "merge_rows": 8, "reduce_warps": 4, "partials": 8},
    ),
    "two sequences": ("dec-b2-h32-hk8-sq16-sk8192-d128", "hopper_decode", {"schedule": "shares", "per_sm": 1}),
    "many": ("dec-b256-h32-hk8-sq16-sk512-d128-page64", "hopper_decode", {"schedule": "grid", "per_sm": 2}),
    "narrow": ("dec-b16-h64-hk8-sq8-sk8192-d64", "hopper_decode", {"per_sm": 2, "slack": 16, "merge_rows": 16}),
    "narrow, short": ("dec-b4-h64-hk8-sq8-sk1024-d64", "hopper_decode", {"schedule": "grid", "block_n": 128}),
    "narrow, short, two blocks": ("dec-b4-h64-hk8-sq16-sk1024-d64", "hopper_decode", {"schedule": "grid", "per_sm": 2}),
    "wide": ("dec-b16-h16-hk8-sq16-sk8192-d256", "hopper_decode", {"schedule": "shares", "num_stages": 3}),
    "softcap": ("dec-b16-h32-hk8-sq16-sk8192-d128-softcap", "portable_decode", {}),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_choose_the_family_and_its_tiles(name: str) -> None:
    key, family_id, knobs = SIZES[name]
    workload = Workload.parse(key)
    config = decode_config(workload.specialization, Sizes.of(workload), H200)
    assert (config.family, {knob: config[knob] for knob in knobs}) == (family_id, knobs)
    assert invalid(config, workload.specialization, H200) is None


@pytest.mark.parametrize(
    ("key", "queries", "family_id"),
    [
        ("dec-bf16-d128", 1, "hopper_decode"),
        ("dec-bf16-d128", 16, "hopper_decode"),
        ("dec-bf16-d256", 1, "hopper_decode"),
        ("dec-bf16-d256", 16, "portable_decode"),
    ],
)
def test_where_no_bits_depend_on_the_batch_the_rule_reads_none_of_it(key: str, queries: int, family_id: str) -> None:
    spec = Specialization.parse(key)
    found = set[tuple[object, ...]]()
    for batch in (1, 17, 128, 2000):
        sizes = Sizes(batch=batch, nheads=32, nheads_k=8, seqlen_q=queries, seqlen_k=0)
        config = decode_config(spec, sizes, H200)
        found.add((config.family, config["block_m"], config["block_n"], config["per_sm"], config["schedule"]))
    assert [row[0] for row in found] == [family_id]


@pytest.mark.parametrize(
    ("queries", "knobs", "rows"),
    [
        (16, {}, 8),
        (16, {"per_sm": 2, "num_stages": 3}, 8),
        (16, GRID, 1),
        (8, {}, 1),
        (8, {"per_sm": 2, "num_stages": 3}, 8),
        (1, {"block_m": 8, "per_sm": 2, "num_stages": 3}, 1),
    ],
)
def test_a_merge_with_many_programs_takes_rows_together(queries: int, knobs: dict[str, KnobValue], rows: int) -> None:
    spec = Specialization.parse("dec-bf16-d128")
    config = HOPPER_DECODE.default(spec, H200).replace(**{"block_n": 64, **knobs})
    sizes = Sizes(batch=4, nheads=32, nheads_k=8, seqlen_q=queries, seqlen_k=4096)
    fitted = HOPPER_DECODE.fitted(spec, config, sizes, H200)
    assert (fitted["merge_rows"], fitted["partials"]) == (rows, 32 if rows == 1 else 8)
    assert (
        HOPPER_DECODE.fitted(spec, fitted.replace(block_m=64), sizes._replace(batch=4000), H200)["merge_rows"] == rows
    )


@pytest.mark.parametrize(("queries", "block_m"), [(1, 8), (3, 16), (8, 32), (9, 32)])
def test_few_rows_are_as_many_as_a_call_has(queries: int, block_m: int) -> None:
    spec = Specialization.parse("dec-bf16-d128")
    config = HOPPER_DECODE.default(spec, H200).replace(block_m=16)
    sizes = Sizes(batch=4, nheads=32, nheads_k=8, seqlen_q=queries, seqlen_k=4096)
    assert HOPPER_DECODE.fitted(spec, config, sizes, H200)["block_m"] == block_m
    assert HOPPER_DECODE.fitted(spec, config.replace(block_m=64), sizes, H200)["block_m"] == 64


# --- the rule, held to races -----------------------------------------------------------------------------------------

RACES = Path(__file__).with_name("decode_families_nvidia_h100.csv")
"""Races of both families on an H100, us of a call on each profile of lengths."""


def tiles_of(config: Config) -> str:
    """The name that a config has in the file."""
    if config.family != HOPPER_DECODE.id:
        return "portable"
    few = "" if config["block_m"] == 64 else "few "
    one = "two" if config["per_sm"] == 2 else "wide" if config["block_n"] == 128 else "one"
    one += " slack" if config["slack"] == 16 else ""
    merged = f" m{config['merge_rows']}" if config.integer("merge_rows") > 1 else ""
    return f"{few}{'grid ' if config['schedule'] == 'grid' else ''}{one}{merged}"


def races() -> Iterator[tuple[str, dict[str, float]]]:
    """What the rule chooses for each shape, and the times of all on all profiles together."""
    with RACES.open() as file:
        rows = list(csv.DictReader(file))
    shape = ("nheads", "nheads_k", "head_dim", "batch", "seqlen_q", "seqlen_k", "page_size", "split_size")
    for _, each in itertools.groupby(rows, key=lambda row: [row[name] for name in shape]):
        found = list(each)
        at = {name: int(found[0][name]) for name in shape}
        page = f"-page{at['page_size']}" if at["page_size"] else ""
        spec = Specialization.parse(f"dec-bf16-d{at['head_dim']}{page}")
        sizes = Sizes(
            **{name: at[name] for name in ("batch", "nheads", "nheads_k", "seqlen_q")},
            seqlen_k=0 if at["split_size"] else at["seqlen_k"],
        )
        times = {row["tiles"]: sum(float(row[f"{name}_us"] or 0) for name in PROFILES) for row in found}
        yield tiles_of(decode_config(spec, sizes, find_device("h100"))), times


def test_the_rule_is_near_the_best_of_both_families() -> None:
    found = list(races())
    behind = [times[chosen] / min(times.values()) for chosen, times in found]
    assert len(behind) == 214
    assert statistics.geometric_mean(behind) < 1.014
    assert max(behind) < 1.13
    ahead = [times["portable"] / times[chosen] for chosen, times in found if chosen != "portable"]
    assert len(ahead) == 214
    assert statistics.geometric_mean(ahead) > 1.12
    assert min(ahead) > 0.97
