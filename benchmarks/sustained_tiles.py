"""What tiles of the Hopper forward family take under load that goes on, over what their constants say.

python -m benchmarks.sustained_tiles FILE.csv [--limit-seconds 300]     races tiles in long windows on a GPU
python -m benchmarks.sustained_tiles FILE.csv --fit                     factors from such a file, without a GPU
python -m benchmarks.sustained_tiles FILE.csv --dtype fp16              of float16, either way

Shapes are those that are expected to take `tiles.SUSTAINED_US` or more. Rows are added when a shape is done, and a
shape that has rows is not raced again. `--fit` prints the factor of each tile (`tiles.SUSTAINED`) and, with each shape
left out, what the tile that is chosen takes over the best one, beside what is chosen without factors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.search_bench import raced
from benchmarks.search_files import read
from benchmarks.tile_races import add_race_arguments, race_all, rows_of
from benchmarks.tiles import (
    SHAPES,
    Times,
    configs,
    shape_of,
    takes_long,
    tiles_of,
    times_of,
)
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward.tile_order import ordered
from flashgen.codegen.hopper_forward.tiles import TILES, Tile
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.measure.protocol import Executor, specialization
from flashgen.tuning.compile_pool import Compiler

ROUNDS, WINDOW_S, WARM_S, SETTLE_S = 5, 0.1, 0.03, 1.0

FIRST_SHAPES = (
    "b2-h16-s8192",
    "b2-h24-s3072",
    "b8-h16-s2048",
    "b1-h64-hk8-s3072",
    "b1-h12-s10240",
    "b16-h16-s1024",
    "b4-h32-hk8-s4096",
    "b12-h12-s1536",
)
"""Of different lengths and numbers of heads, so that a short run says something of each class."""

MORE_SHAPES = (
    "b1-h21-s16384",
    "b1-h24-s4608",
    "b1-h32-hk8-s4096",
    "b1-h32-hk8-s8192",
    "b1-h32-hk8-s32768",
    "b1-h32-hk16-s8192",
    "b1-h32-s16384",
    "b1-h64-hk8-s4096",
    "b1-h64-hk8-s8192",
    "b1-h64-hk8-s16384",
    "b2-h32-hk8-s8192",
    "b2-h32-s8192",
    "b4-h16-hk4-s4096",
    "b4-h32-hk8-s4096",
    "b4-h32-s4096",
    "b4-h64-hk8-s2048",
    "b8-h32-hk8-s2048",
    "b8-h32-s2048",
    "b16-h32-hk8-s2048",
    "b16-h32-s1024",
)
"""Of searches, beside those that `benchmarks.tiles` has."""


def workloads(sm_count: int, dtype: str = "bf16") -> Iterator[Workload]:
    """The long ones of every class that has tiles: each shape of all classes before the next one."""
    for shape in dict.fromkeys((*FIRST_SHAPES, *SHAPES, *MORE_SHAPES)):
        for head_dim, causal in TILES:
            workload = Workload.parse(f"{dtype}-{shape}-d{head_dim}{'-causal' if causal else ''}")
            if takes_long(workload, sm_count):
                yield workload


def race(executor: Executor, compiler: Compiler, workload: Workload) -> list[dict[str, object]]:
    """One race of all tiles, each in the order that it has at these sizes."""
    device, spec, sizes = executor.describe().device, specialization(workload), Sizes.of(workload)
    ours = {shape: ordered(spec, config, sizes, device) for shape, config in configs(workload, device).items()}
    outcomes = raced(
        executor, compiler, workload, ours.values(), rounds=ROUNDS, window_s=WINDOW_S, warm_s=WARM_S, settle_s=SETTLE_S
    )
    return rows_of(workload, ours, outcomes)


def factors(tiles: Sequence[Tile], times: Times, sm_count: int) -> list[float]:
    """Measured over expected time of each tile, geometric mean."""
    return [
        statistics.geometric_mean(
            1e3 * of[shape_of(tile)] / tile.time(Sizes.of(workload), sm_count, causal=workload.causal)
            for workload, of in times.items()
            if shape_of(tile) in of
        )
        for tile in tiles
    ]


def left_out(tiles: Sequence[Tile], times: Times, sm_count: int) -> list[float]:
    """For each shape the time of the tile that factors choose which were fitted without it, over the best one's."""
    found = []
    for workload in times:
        made = factors(tiles, {other: of for other, of in times.items() if other != workload}, sm_count)
        found.append(_loss(workload, times[workload], tiles, made, sm_count))
    return found


def _loss(
    workload: Workload, times: Mapping[tuple[int, int], float], tiles: Sequence[Tile], made: Sequence[float], sms: int
) -> float:
    expected = {
        shape_of(tile): factor * tile.time(Sizes.of(workload), sms, causal=workload.causal)
        for tile, factor in zip(tiles, made, strict=True)
    }
    return times[min(times, key=lambda shape: expected[shape])] / min(times.values())


def report(rows: Iterable[Mapping[str, str]], sm_count: int, dtype: str) -> str:
    """A line for each class, in the order of the file."""
    lines = []
    for (head_dim, causal), times in times_of(rows, dtype).items():
        if len(times) < 2:  # one shape says nothing of others
            continue
        tiles = tiles_of(head_dim, causal)
        ones = [1.0] * len(tiles)
        without = [_loss(workload, of, tiles, ones, sm_count) for workload, of in times.items()]
        made = ", ".join(f"{factor:.3f}" for factor in factors(tiles, times, sm_count))
        left = _of(left_out(tiles, times, sm_count))
        lines.append(
            f"({head_dim}, {causal}): ({made}), {len(times)} shapes; left out {left}; without factors {_of(without)}"
        )
    return "\n".join(lines)


def _of(losses: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(losses):.4f}, at most {max(losses):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    options = _parser().parse_args(arguments)
    if options.fit:
        print(report(read(options.file), find_device(options.target).num_sms, options.dtype))
        return 0
    return race_all(options, lambda device: workloads(device.num_sms, options.dtype), race)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.sustained_tiles", description=(__doc__ or "").split("\n")[0])
    add_race_arguments(parser, fit="print factors instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
