"""Groups of heads that the L2 cache holds, and what trials of searches that differ in nothing else say of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

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
SEARCHES = Path(__file__).parents[2] / "benchmarks/searches/nvidia_h200"
LARGE_TILE = {"warpgroups": 4, "block_n": 64, "blocks_per_sm": 1}


def workload_of(path: Path) -> Workload:
    return Workload.parse(path.name.removesuffix(SUFFIX).rpartition("-")[0])


def log_ratios() -> Iterator[float]:
    """Of two trials of a search that differ in their groups alone, of which one has what serves: its time over the
    other's."""
    for path in SEARCHES.glob(f"fwd-*-d64-causal-*{SUFFIX}"):
        workload = workload_of(path)
        spec, sizes = workload.specialization, Sizes.of(workload)
        times: defaultdict[Config, dict[int, float]] = defaultdict(dict)
        for trial in read_log(path).trials if is_plain_forward(spec) else ():
            config, outcome = trial.config, trial.outcome
            if isinstance(outcome, Measurement) and LARGE_TILE.items() <= dict(config.knobs).items():
                times[config.replace(heads_per_group=1)][config.integer("heads_per_group")] = outcome.median_ms
        for config, found in times.items():
            few = config.replace(heads_per_group=8)
            served = tile_order.ordered(spec, few, sizes, H200).integer("heads_per_group")
            if {8, 32} <= found.keys() and sizes.batch * sizes.nheads * sizes.seqlen_q > 6 * 256 * H200.num_sms:
                yield math.log(found[served] / found[40 - served])


def test_the_larger_groups_won_where_the_cache_holds_them_and_the_smaller_ones_elsewhere() -> None:
    ratios = list(log_ratios())
    assert len(ratios) >= 15
    assert statistics.mean(ratios) < -0.03


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
