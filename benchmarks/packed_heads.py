"""What tiles of the Hopper forward family take in dense calls with several heads of a group side by side.

python -m benchmarks.packed_heads FILE.csv [--limit-seconds 300]     races tiles with any heads on a GPU
python -m benchmarks.packed_heads FILE.csv --fit                     factors from such a file, without a GPU

Shapes are those of grouped-query attention, with lengths that fill tiles of one head and with others. Rows are added
when a shape is done, and a shape that has rows is not raced again. `--fit` prints the factor of a step of each tile
(`tiles.GROUPED`) and what serves over the best tile of each shape, beside what would serve with one head a tile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks import tiles
from benchmarks.search_bench import raced
from benchmarks.search_files import read
from benchmarks.tile_races import COLUMNS, ByClass, add_race_arguments, losses_of, race_all, rows_of, times_by_class
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_packing import SEQUENCE_HEADS, packing_of_group
from flashgen.codegen.hopper_forward.defaults import with_heads
from flashgen.codegen.hopper_forward.tile_order import ordered
from flashgen.codegen.hopper_forward.tiles import GROUPED_CONSTANTS, TILES, Tile
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.workload import Workload
from flashgen.measure.protocol import Executor, specialization
from flashgen.tuning.compile_pool import Compiler

CLASSES = ((128, True), (128, False), (64, True), (64, False))
"""Head dimensions of models with groups of heads, and whether the mask is causal."""

FEWER = 10
"""Shapes of the narrower ones, whose tiles are more."""

SHAPES = (
    "b32-h32-hk8-s300",
    "b8-h32-hk8-s780",
    "b1-h32-hk8-s520",
    "b16-h64-hk8-s400",
    "b4-h32-hk8-s2100",
    "b8-h28-hk4-s300",
    "b16-h32-hk8-s130",
    "b8-h32-hk8-s1050",
    "b4-h32-hk8-sq300-sk4096",
    "b16-h32-hk8-s512",
    "b1-h64-hk8-s1300",
    "b8-h16-hk8-s650",
    "b32-h32-hk8-s80",
    "b16-h24-hk8-s400",
    "b4-h28-hk4-s1050",
    "b2-h32-hk8-s1600",
    "b8-h64-hk8-s650",
    "b32-h32-hk8-s200",
    "b1-h32-hk8-s300",
    "b4-h71-hk1-s520",
    "b2-h64-hk8-s3000",
    "b8-h32-hk2-s330",
)
"""Of each class, so that a short run says something of all."""

HEADS = "packed_heads"
GROUPED_COLUMNS = (*COLUMNS[:-1], HEADS, COLUMNS[-1])

ROUNDS, WINDOW_S, WARM_S = 3, 0.02, 0.006
SETTLE_S = 0.3
"""Enough behind another race, which most of these are."""

Shape = tuple[int, int, int]
"""Warpgroups, keys of a step, and heads side by side."""

Races = Mapping[Workload, Mapping[Shape, float]]
"""Times in ms."""


def workloads(dtype: str = "bf16") -> Iterator[Workload]:
    """Each shape of all classes before the next one."""
    for number, shape in enumerate(SHAPES):
        for head_dim, causal in CLASSES if number < FEWER else CLASSES[:2]:
            yield Workload.parse(f"{dtype}-{shape}-d{head_dim}" + ("-causal" if causal else ""))


def heads_of(workload: Workload) -> tuple[int, ...]:
    """The numbers of heads that are raced: one, and as many as share keys, or the next power of two, up to eight."""
    group = workload.nheads // workload.nheads_k
    return 1, next((n for n in SEQUENCE_HEADS if n >= group), SEQUENCE_HEADS[-1])


def grouped_configs(workload: Workload, device: Device) -> dict[Shape, Config]:
    """One config for each tile and number of heads, in the order of tiles that it has at these sizes."""
    spec, sizes = specialization(workload), Sizes.of(workload)
    found = {}
    for (warpgroups, block_n), config in tiles.configs(workload, device).items():
        for heads in heads_of(workload):
            packed = with_heads(spec, config, heads, device)
            if packed.integer(HEADS) == heads:
                found[warpgroups, block_n, heads] = ordered(spec, packed, sizes, device)
    return found


def shape_of(config: Config) -> Shape:
    """That of a config."""
    return config.integer("warpgroups"), config.integer("block_n"), config.integer(HEADS)


def race(executor: Executor, compiler: Compiler, workload: Workload) -> list[dict[str, object]]:
    """One race; a tile that fails has no row."""
    ours = grouped_configs(workload, executor.describe().device)
    outcomes = raced(
        executor, compiler, workload, ours.values(), rounds=ROUNDS, window_s=WINDOW_S, warm_s=WARM_S, settle_s=SETTLE_S
    )
    return rows_of(workload, ours, outcomes, GROUPED_COLUMNS)


def times_of(rows: Iterable[Mapping[str, str]], dtype: str = "bf16") -> ByClass[Shape]:
    """The times of a file by class, of one dtype."""
    return times_by_class(rows, lambda row: (int(row["warpgroups"]), int(row["block_n"]), int(row[HEADS])), dtype)


def fit(tile: Tile, races: Races, sm_count: int, *, causal: bool, has_constants: bool) -> Tile:
    """A tile with its `grouped`, and with constants of calls whose heads share keys where the class has such."""
    shape = tiles.shape_of(tile)
    if has_constants:
        alone = {workload: {each[:2]: ms for each, ms in of.items() if each[2] == 1} for workload, of in races.items()}
        tile = tiles.Fit.of(tile, alone, sm_count, causal=causal).tile
    tile, ratios = replace(tile, grouped=1.0), []
    for workload, of in races.items():
        sizes = Sizes.of(workload)
        heads = packing_of_group(sizes)
        several, one = of.get((*shape, heads)), of.get((*shape, 1))
        if heads > 1 and several and one:
            expected = [tile.time(sizes, sm_count, causal=causal, packed_heads=n) for n in (heads, 1)]
            launched = (several - tiles.LAUNCH_MS) / (one - tiles.LAUNCH_MS)
            ratios.append(launched * expected[1] / expected[0])
    return replace(tile, grouped=statistics.geometric_mean(ratios))


def losses(races: Races, device: Device) -> dict[Shape, list[float]]:
    """By the tile of a config with one head: what serves shapes in its place, over the best of each that was raced."""
    found = losses_of(races, device, grouped_configs, shape_of)
    return {own: lost for own, lost in found.items() if own[2] == 1}


def report(rows: Iterable[Mapping[str, str]], device: Device, dtype: str) -> str:
    """The constants of every class, in the order of `tiles.GROUPED_TILES`, and what they are worth."""
    lines = []
    for (head_dim, causal), races in times_of(rows, dtype).items():
        for tile in TILES[head_dim, causal]:
            made = fit(
                tile, races, device.num_sms, causal=causal, has_constants=(head_dim, causal) in GROUPED_CONSTANTS
            )
            lines.append(
                f"{tiles.named(head_dim, causal)} {64 * tile.warpgroups:3} x {tile.block_n:3}: ({made.step:.3f}, "
                f"{made.overhead:g}, {made.lone:g}, {made.tail:g}, {made.before:g}), "
                f"{made.grouped:.3f} with several heads"
            )
        alone = [min(ms for each, ms in of.items() if each[2] == 1) / min(of.values()) for of in races.values()]
        lines += [
            f"  by {64 * own[0]:3} x {own[1]:3}: {_of(lost)}, of {len(lost)}"
            for own, lost in losses(races, device).items()
        ]
        lines.append(f"  the best tile with one head: {_of(alone)}")
    return "\n".join(lines)


def _of(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.3f}, at most {max(ratios):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    options = _parser().parse_args(arguments)
    if options.fit:
        print(report(read(options.file), find_device(options.target), options.dtype))
        return 0
    found = workloads(options.dtype)
    return race_all(options, lambda device: found, race, columns=GROUPED_COLUMNS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.packed_heads", description=(__doc__ or "").split("\n")[0])
    add_race_arguments(parser, fit="print factors instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
