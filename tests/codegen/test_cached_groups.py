"""Groups of heads that the L2 cache holds, and what trials of searches that differ in nothing else say of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

import pytest

from benchmarks.left_out import SEARCHES
from flashgen.codegen.common_scores import is_plain_forward
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import tile_order
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.record import Measurement
from flashgen.core.workload import Workload
from flashgen.db.log_files import SUFFIX, read_log

H200 = find_device("h200")
LARGE_TILE = {"warpgroups": 4, "block_n": 64, "blocks_per_sm": 1}


def log_ratios(head_dim: int, warpgroups: int, block_n: int) -> Iterator[float]:
    """What serves over another group: times of two trials of a search, or racers, that differ in this alone."""
    most_waves = tile_order.CACHED[head_dim, warpgroups, block_n].waves
    tile = {"warpgroups": warpgroups, "block_n": block_n, "split_d": False, "packed_heads": 1}
    for path in (SEARCHES / H200.folder).glob(f"fwd-*-d{head_dim}-causal-*{SUFFIX}"):
        log = read_log(path)
        assert log.search is not None
        workload = log.search.workload
        spec, sizes = workload.specialization, Sizes.of(workload)
        waves = sizes.batch * sizes.nheads * -(-sizes.seqlen_q // (64 * warpgroups)) / H200.num_sms
        if not is_plain_forward(spec) or not tile_order.FEW_WAVES < waves <= most_waves:
            continue
        times: defaultdict[tuple[int | None, Config], dict[int, float]] = defaultdict(dict)
        for race, config, outcome in (
            *((None, each.config, each.outcome) for each in log.trials),
            *((each.race, each.config, each.outcome) for each in log.finalists),
        ):
            if isinstance(outcome, Measurement) and tile.items() <= dict(config.knobs).items():
                alike = config.replace(heads_per_group=1)
                times[race, alike][config.integer("heads_per_group")] = outcome.median_ms
        for (_, alike), found in times.items():
            for own in found:
                served = tile_order.ordered(spec, alike.replace(heads_per_group=own), sizes, H200)
                if (group := served.integer("heads_per_group")) != own and group in found:
                    yield math.log(found[group] / found[own])


@pytest.mark.parametrize(("tile", "pairs", "gain"), [((64, 4, 64), 15, 0.03), ((128, 2, 128), 15, 0.02)])
def test_what_serves_took_less_time_than_other_groups(tile: tuple[int, int, int], pairs: int, gain: float) -> None:
    ratios = list(log_ratios(*tile))
    assert len(ratios) >= pairs
    assert statistics.mean(ratios) < -gain


@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ("b8-h32-s2048-d64-causal", 32),  # 32 heads have 16 of 60 MiB
        ("b4-h16-s4096-d64-causal", 8),
        ("b1-h48-hk8-s7000-d64-causal", 32),  # of 6 heads of keys
        ("b1-h32-s16384-d64-causal", 8),
    ],
)
def test_a_group_is_as_large_as_the_cache_holds(shape: str, group: int) -> None:
    workload = Workload.parse(shape)
    spec, sizes = workload.specialization, Sizes.of(workload)
    config = HOPPER_FORWARD.default(spec, H200).replace(**LARGE_TILE, ping_pong=True)
    for own in (4, 8, 32):
        found = tile_order.ordered(spec, config.replace(heads_per_group=own), sizes, H200)
        assert found.integer("heads_per_group") == group
        assert found in (config, *tile_order.orders(spec, config.replace(heads_per_group=own)))
    smaller = config.replace(warpgroups=3, block_n=128, heads_per_group=8)
    assert tile_order.ordered(spec, smaller, sizes, H200) == smaller, "nobody timed these"


@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ("b32-h16-s512-d128-causal", 32),  # 32 heads have 8 of 60 MiB
        ("b16-h16-s1024-d128-causal", 4),  # 32 heads have 16 MiB
        ("b16-h32-hk8-s2048-d128-causal", 4),  # of so many waves that their order does not matter
    ],
)
def test_groups_stay_where_none_fits_or_tiles_are_many(shape: str, group: int) -> None:
    workload = Workload.parse(shape)
    spec, sizes = workload.specialization, Sizes.of(workload)
    config = HOPPER_FORWARD.default(spec, H200)
    assert (config["warpgroups"], config["block_n"], config["heads_per_group"]) == (2, 128, 4)
    found = tile_order.ordered(spec, config, sizes, H200)
    assert found.integer("heads_per_group") == group
    assert found in (config, *tile_order.orders(spec, config))
    assert tile_order.ordered(spec, config.replace(heads_per_group=1024), sizes, H200).integer("heads_per_group") <= 32
