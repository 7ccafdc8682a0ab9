"""What serves sizes that nobody measured, against races of the alternatives on an H100 and an H200.

`tile_orders_nvidia_h100.csv` has groups of heads in the order of the tiles of a causal forward pass, that of the H200
launches with more than 32 heads, `tile_turns_nvidia_h200.csv` tiles in one group and in groups of 32 where several CTAs
of an SM may run at once, and `backward_orders_nvidia_h200.csv` groups of backward passes,
`short_queries_nvidia_h100.csv` tiles for few queries of a head, `staggered_warpgroups_nvidia_h100.csv` warpgroups
of a backward pass in step and staggered, and `small_backward_nvidia_h100.csv` both of its families and steps of 64 and
128 queries for few queries and keys.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.families import balanced, beside, default_config, invalid, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import specialization

H100, H200 = find_device("h100"), find_device("h200")
Times = dict[tuple[str, ...], float]


def measured(what: str, columns: tuple[str, ...], card: str = "h100") -> dict[Workload, Times]:
    found: dict[Workload, Times] = defaultdict(dict)
    with (Path(__file__).parent / f"{what}_nvidia_{card}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found[Workload.parse(row["workload"])][tuple(row[column] for column in columns)] = float(row["ms"])
    return found


def served(workload: Workload, config: Config, device: Device = H100) -> Config:
    """What serves a workload beside that of a record of other sizes, which is valid, and known to `beside`."""
    spec = specialization(workload)
    found = balanced(config, spec, Sizes.of(workload), device)
    assert invalid(found, spec, device) is None
    assert found in {config, *beside(config, spec, device)}
    return found


def losses(times: dict[Workload, Times], chosen: Callable[[Workload], tuple[str, ...]]) -> list[float]:
    """Time over that of the best, of all workloads in which what was chosen had been raced."""
    return [own[key] / min(own.values()) for workload, own in times.items() if (key := chosen(workload)) in own]


def words(config: Config, *knobs: str) -> tuple[str, ...]:
    return tuple(str(config[knob]).lower() for knob in knobs)


@pytest.mark.parametrize("own", [4, 8, 16])
def test_few_tiles_of_a_causal_mask_are_one_group_of_heads(own: int) -> None:
    times = measured("tile_orders", ("heads_per_group",))

    def of(workload: Workload) -> Config:
        spec = specialization(workload)
        return usual(default_config(spec, H100), spec, Sizes.of(workload), H100).replace(heads_per_group=own)

    lost = losses(times, lambda workload: words(served(workload, of(workload)), "heads_per_group"))
    assert len(times) == 35
    assert len(lost) == 33, "two have more than 32 heads, whose one group nobody timed there"
    assert statistics.geometric_mean(lost) <= 1.022
    assert max(lost) <= 1.11
    without = losses(times, lambda workload: (str(own),))
    assert statistics.geometric_mean(without) > {4: 1.15, 8: 1.10, 16: 1.06}[own], "which the order is there for"
    assert max(without) > 1.35


def test_of_many_heads_those_are_one_group_that_have_few_tiles() -> None:
    times = measured("tile_orders", ("warpgroups", "heads_per_group"), "h200")

    def chosen(workload: Workload) -> tuple[str, ...]:
        spec = specialization(workload)
        config = usual(default_config(spec, H200), spec, Sizes.of(workload), H200).replace(heads_per_group=8)
        return words(served(workload, config, H200), "warpgroups", "heads_per_group")

    lost = losses(times, chosen)
    assert len(lost) >= 8
    assert statistics.geometric_mean(lost) <= 1.02
    assert max(lost) <= 1.06
    in_groups = losses(times, lambda workload: (chosen(workload)[0], "32"))
    assert statistics.geometric_mean(in_groups) > 1.02, "which a group of all is there for"


def test_ctas_of_an_sm_that_all_run_at_once_are_one_group() -> None:
    """Which gives each SM long and short ones."""
    times = measured("tile_turns", ("warpgroups", "block_n", "heads_per_group"), "h200")

    def chosen(workload: Workload) -> tuple[str, ...]:
        config = default_config(specialization(workload), H200)
        return words(served(workload, config, H200), "warpgroups", "block_n", "heads_per_group")

    turned = [workload for workload in times if chosen(workload)[-1] == "1024"]
    assert len(turned) >= 6
    lost = losses({workload: times[workload] for workload in turned}, chosen)
    in_groups = losses({workload: times[workload] for workload in turned}, lambda each: (*chosen(each)[:-1], "32"))
    assert max(lost) <= 1.01
    assert statistics.geometric_mean(in_groups) > 1.02, "which the order is there for"


@pytest.mark.parametrize("own", [4, 8, 16])
def test_few_tiles_of_a_backward_pass_are_in_large_groups_of_heads(own: int) -> None:
    times = measured("backward_orders", ("heads_per_tile", "heads_per_group"), "h200")

    def chosen(workload: Workload) -> tuple[str, ...]:
        config = default_config(specialization(workload), H200).replace(heads_per_group=own)
        return words(served(workload, config, H200), "heads_per_tile", "heads_per_group")

    lost = losses(times, chosen)
    assert len(lost) >= 36
    assert statistics.geometric_mean(lost) <= 1.008
    assert max(lost) <= {4: 1.08, 8: 1.06, 16: 1.06}[own]
    without = losses(times, lambda workload: (chosen(workload)[0], str(own)))
    assert statistics.geometric_mean(without) > {4: 1.09, 8: 1.05, 16: 1.035}[own], "which the order is there for"
    assert max(without) > 1.17


@pytest.mark.parametrize(
    ("key", "groups"),
    [("bwd-b16-h32-s1024-d64-causal", "8"), ("bwd-b4-h16-s4096-d256-causal", "8"), ("b16-h16-s4096-d128-causal", "32")],
)
def test_many_tiles_are_not_one_group_as_those_of_a_record_with_few(key: str, groups: str) -> None:
    """Which took 1.17 times as long as groups of 8 in the first of these."""
    workload = Workload.parse(key)
    config = default_config(specialization(workload), H200).replace(heads_per_group=ALL_HEADS)
    assert words(served(workload, config, H200), "heads_per_group") == (groups,)


def test_groups_of_heads_of_a_backward_pass_fit_into_the_l2_cache() -> None:
    """Those of key heads that four query heads share have four times the queries."""
    times = measured("backward_orders", ("heads_per_tile", "heads_per_group"), "h200")

    def chosen(workload: Workload) -> tuple[str, ...]:
        config = default_config(specialization(workload), H200).replace(heads_per_group=16)
        return words(served(workload, config, H200), "heads_per_tile", "heads_per_group")

    large = [Workload.parse(f"bwd-bf16-{key}-d128-causal") for key in ("b4-h16-hk4-s4096", "b2-h32-hk8-s2048")]
    own = {workload: times[workload] for workload in large}
    assert [chosen(workload)[-1] for workload in large] == ["4", "8"]
    assert max(losses(own, chosen)) == 1
    assert min(losses(own, lambda workload: (chosen(workload)[0], "16"))) > 1.03, "which the cache is asked for"


def test_keys_before_all_queries_make_tiles_alike_whose_rounds_count() -> None:
    """243 tiles of all heads of a group are two rounds on 132 SMs, without short ones; of two heads they are 486."""
    times = measured("backward_orders", ("heads_per_tile",), "h200")
    workload = Workload.parse("bwd-bf16-b3-h12-hk3-sq2048-sk3335-d128-causal")
    chosen = served(workload, default_config(specialization(workload), H200), H200)
    assert chosen["heads_per_tile"] == 2
    assert times[workload]["2",] == min(times[workload].values())
    square = workload.with_shape(seqlen_q=3335, seqlen_k=3335)
    assert served(square, default_config(specialization(square), H200), H200)["heads_per_tile"] == 0


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(batch=4, nheads=16, nheads_k=16, seqlen_q=4096, seqlen_k=4096), id="many tiles"),
        pytest.param(Sizes(batch=1, nheads=4, nheads_k=4, seqlen_q=8000, seqlen_k=8000), id="no more heads"),
        pytest.param(Sizes(batch=1, nheads=8, nheads_k=8, seqlen_q=1024, seqlen_k=8192), id="tiles of equal work"),
        pytest.param(Sizes(batch=1, nheads=12, nheads_k=12, seqlen_q=1024, seqlen_k=1024), id="one wave"),
    ],
)
def test_the_order_stays_where_it_decides_nothing(sizes: Sizes) -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal")
    assert balanced(default_config(spec, H100), spec, sizes, H100)["heads_per_group"] == 4


@pytest.mark.parametrize("key", ["fwd-bf16-d128-causal-window", "fwd-bf16-d128", "fwd-bf16-d128-causal-varlen"])
def test_orders_that_nobody_timed_stay(key: str) -> None:
    spec = Specialization.parse(key)
    config = default_config(spec, H100)
    sizes = Sizes(batch=1, nheads=12, nheads_k=12, seqlen_q=3000, seqlen_k=3000)
    assert balanced(config, spec, sizes, H100)["heads_per_group"] == config["heads_per_group"]


def test_few_queries_have_tiles_of_one_warpgroup() -> None:
    times = measured("short_queries", ("warpgroups", "block_n", "blocks_per_sm"))
    before = measured("short_queries", ("config", "ms"))

    def tile(workload: Workload) -> tuple[str, ...]:
        spec = specialization(workload)
        config = usual(default_config(spec, H100), spec, Sizes.of(workload), H100)
        return words(config, "warpgroups", "block_n", "blocks_per_sm")

    lost = losses(times, tile)
    assert len(lost) >= 9
    assert statistics.geometric_mean(lost) <= 1.01
    assert max(lost) <= 1.06
    alone = [
        min(own.values()) / next(ms for (kind, _), ms in own.items() if kind == "served") for own in before.values()
    ]
    assert statistics.geometric_mean(alone) < 0.9, "which these tiles are there for"


def test_few_queries_keep_tiles_that_share_keys_and_those_of_features() -> None:
    spec = Specialization.parse("fwd-bf16-d128")
    config = default_config(spec, H100)
    long = Sizes(batch=1, nheads=16, nheads_k=16, seqlen_q=48, seqlen_k=2000)
    assert words(balanced(config, spec, long, H100), "warpgroups", "split_keys") == ("2", "true")
    many = Sizes(batch=64, nheads=16, nheads_k=16, seqlen_q=48, seqlen_k=2000)
    assert balanced(config, spec, many, H100)["warpgroups"] == 1, "by waves, with as many CTAs as there are tiles"
    with_slopes = Specialization.parse("fwd-bf16-d128-alibi")
    config = default_config(with_slopes, H100)
    few = Sizes(batch=2, nheads=16, nheads_k=16, seqlen_q=48, seqlen_k=300)
    assert balanced(config, with_slopes, few, H100)["warpgroups"] == config["warpgroups"]


def test_packed_heads_of_few_queries_fit_into_one_warpgroup() -> None:
    """9 queries of 8 heads are 72 rows: two packs of four heads."""
    spec = Specialization.parse("fwd-bf16-d64")
    sizes = Sizes(batch=1, nheads=16, nheads_k=2, seqlen_q=9, seqlen_k=500)
    found = usual(default_config(spec, H100), spec, sizes, H100)
    assert words(found, "warpgroups", "packed_heads") == ("1", "4")


def stale(workload: Workload) -> Config:
    """A record's config with warpgroups in step, as most of the H200's for a causal mask."""
    spec = specialization(workload)
    return usual(default_config(spec, H100), spec, Sizes.of(workload), H100).replace(stagger_warpgroups=False)


def order(workload: Workload) -> tuple[str, ...]:
    """That in which both were raced."""
    return words(default_config(specialization(workload), H100), "heads_per_group")


def test_warpgroups_of_a_backward_pass_stagger_where_that_is_faster() -> None:
    times = measured("staggered_warpgroups", ("stagger_warpgroups", "heads_per_group"))

    def chosen(workload: Workload) -> tuple[str, ...]:
        found = words(served(workload, stale(workload)), "stagger_warpgroups")
        return (*found, *order(workload))

    lost = losses(times, chosen)
    assert len(lost) == len(times) == 32
    assert statistics.geometric_mean(lost) <= 1.011
    assert max(lost) <= 1.08
    in_step = losses(times, lambda workload: ("false", *order(workload)))
    assert statistics.geometric_mean(in_step) > 1.04, "which the rule is there for"
    assert max(in_step) > 1.4


@pytest.mark.parametrize("key", ["bwd-bf16-d64-causal-varlen", "bwd-bf16-d64-deterministic"])
def test_backward_passes_that_nobody_timed_or_that_cannot_keep_their_order(key: str) -> None:
    spec = Specialization.parse(key)
    config = default_config(spec, H100)
    if "stagger_warpgroups" in dict(config.knobs):
        config = config.replace(stagger_warpgroups=False)
    sizes = Sizes(batch=1, nheads=4, nheads_k=4, seqlen_q=500, seqlen_k=500)
    found = balanced(config, spec, sizes, H100)
    assert found.get("stagger_warpgroups", False) is False


def test_short_backward_passes_take_steps_and_a_family_of_their_own() -> None:
    timed = measured("small_backward", ("family", "block_m"))
    times = {workload: found for workload, found in timed.items() if workload.seqlen_k > 128}  # else tiles write dq

    def chosen(workload: Workload) -> tuple[str, ...]:
        spec = specialization(workload)
        found = served(workload, default_config(spec, H100))
        return found.family.removeprefix("hopper_backward_"), str(found["block_m"])

    lost = losses(times, chosen)
    assert len(lost) == len(times) == 49
    assert statistics.geometric_mean(lost) <= 1.002
    assert max(lost) <= 1.021
    fused = losses(timed, lambda workload: ("fused", "64" if workload.head_dim > 64 else "128"))
    assert len(fused) == 59
    assert statistics.geometric_mean(fused) > 1.085, "which the rules are there for, and tiles that write dq"
    assert max(fused) > 1.6


@pytest.mark.parametrize(
    ("keys", "on_h100", "on_h200"), [(256, "split", "split"), (512, "split", "fused"), (513, "fused", "fused")]
)
def test_a_kernel_of_its_own_has_dq_of_fewer_keys_where_memory_is_faster(keys: int, on_h100: str, on_h200: str) -> None:
    workload = Workload.parse(f"bwd-b32-h16-s{keys}-d128")
    spec = specialization(workload)
    for device, family in ((H100, on_h100), (H200, on_h200)):
        assert served(workload, default_config(spec, device), device).family == f"hopper_backward_{family}"


def test_backward_passes_of_few_keys_have_tiles_that_write_dq() -> None:
    columns = "block_m", "persistent", "stagger_warpgroups", "query_shares"
    times = measured("all_keys", ("family", "dq_conversion", *columns), "h200")

    def chosen(workload: Workload) -> tuple[str, ...]:
        spec = specialization(workload)
        found = served(workload, default_config(spec, H200), H200)
        return found.family, str(found["dq_conversion"]), *(str(found[name]) for name in columns)

    lost = losses(times, chosen)
    assert len(lost) == len(times) == 14
    assert statistics.geometric_mean(lost) <= 1.002
    assert max(lost) <= 1.011
    sums = [min(ms for key, ms in own.items() if key[1] != "none") / min(own.values()) for own in times.values()]
    assert statistics.geometric_mean(sums) > 1.4, "which the tiles are there for"
    assert min(sums) > 1.25


@pytest.mark.parametrize(
    "key", ["bwd-bf16-d64-causal-varlen", "bwd-bf16-d64-window", "bwd-bf16-d128-softcap", "bwd-bf16-d128-deterministic"]
)
def test_short_backward_passes_that_nobody_timed_keep_what_was_measured(key: str) -> None:
    spec = Specialization.parse(key)
    config = default_config(spec, H100)
    sizes = Sizes(batch=64, nheads=16, nheads_k=16, seqlen_q=100, seqlen_k=100)
    found = balanced(config, spec, sizes, H100)
    assert (found.family, found["block_m"]) == (config.family, config["block_m"])
