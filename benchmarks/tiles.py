"""What tiles of the Hopper forward family take at sizes of few waves, and the constants of the estimate that follow.

python -m benchmarks.tiles FILE.csv [--limit-seconds 300]     races every tile of `tiles.TILES` on a GPU
python -m benchmarks.tiles FILE.csv --candidates --short      other classes, too, and shapes of 128 to 512 queries
python -m benchmarks.tiles FILE.csv --head-dim 64 --mask full one class alone
python -m benchmarks.tiles FILE.csv --fit                     from such a file, without a GPU
python -m benchmarks.tiles FILE.csv --served [--dtype fp16]   likewise

`benchmarks.sustained_tiles` does the same of launches that meet the power limit of a card, in longer windows.

Rows are added when a shape is done, and a shape that has rows is not raced again. `--fit` prints the constants of each
tile, how far off they are, and, with each shape left out of them, what the tile that is chosen takes over the best one.
`--served` prints what the tiles that serve today take over it, by the tile that a record would have.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.search_bench import raced
from benchmarks.search_files import read
from benchmarks.tile_races import ByClass, Shape, add_race_arguments, losses_of, race_all, rows_of, times_by_class
from flashgen.codegen.families import family
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward.tile_choice import with_tile
from flashgen.codegen.hopper_forward.tiles import SUSTAINED, SUSTAINED_US, TILES, Tile
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.workload import Workload
from flashgen.measure.protocol import Executor, specialization
from flashgen.tuning.compile_pool import Compiler

SHAPES = (
    "b1-h8-s2048",
    "b1-h8-s4096",
    "b1-h12-s1664",
    "b1-h12-s2816",
    "b1-h12-s10240",
    "b1-h16-s1024",
    "b1-h16-s2048",
    "b1-h20-s6144",
    "b1-h24-s1536",
    "b1-h24-s3584",
    "b1-h24-s4250",
    "b1-h32-s1024",
    "b1-h32-s3000",
    "b1-h40-s2048",
    "b1-h64-s1100",
    "b2-h16-s1536",
    "b2-h24-s3072",
    "b3-h16-sq700-sk5000",
    "b4-h16-s700",
    "b8-h16-s1152",
    "b1-h12-s16384",
    "b2-h16-s8192",
    "b4-h16-s4096",
    "b8-h16-s2048",
)
"""Of each class: most have one to three waves of CTAs on 132 SMs."""

LONG_KEYS = (
    "b1-h12-sq4096-sk20480",
    "b1-h32-sq512-sk8192",
    "b1-h40-sq300-sk3000",
    "b2-h16-sq1024-sk6144",
    "b4-h8-sq2048-sk4096",
    "b8-h16-sq256-sk2500",
)
"""Of causal classes: most keys are seen by all queries, so that CTAs are nearly alike."""

SHORT_SHAPES = (
    "b1-h4-s512",
    "b1-h16-s320",
    "b2-h48-s160",
    "b3-h8-s266",
    "b4-h16-s285",
    "b4-h32-s201",
    "b8-h12-s128",
    "b8-h20-s128",
    "b4-h16-sq130-sk158",
    "b8-h16-s256",
    "b16-h8-s149",
    "b16-h16-s192",
    "b16-h16-s512",
)


CANDIDATES: Mapping[tuple[int, bool], tuple[Tile, ...]] = {
    (head_dim, causal): TILES[columns, causal]
    for head_dim, columns in ((48, 56), (88, 96), (104, 128))
    for causal in (False, True)
}
"""Of classes that have no table of their own, so that a race says what one would be worth."""

ROUNDS, WINDOW_S, WARM_S = 3, 0.03, 0.01
SETTLE_S = 0.6
"""Enough behind another race, which most of these are."""

LAUNCH_MS = 0.003
"""What of a time belongs to no CTA; with 2 or 4 us the constants choose worse."""

OVERHEADS = tuple(float(steps) for steps in range(9))
LONE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TAILS = (0.0, 0.25, 0.5, 0.75, 1.0)
BEFORE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Constants that are tried."""

Times = Mapping[Workload, Mapping[Shape, float]]


def workloads(*, candidates: bool = False, short: bool = False, dtype: str = "bf16") -> Iterator[Workload]:
    """Every shape of every class, of `candidates`, which come first, and `short` ones, too."""
    classes = [*(CANDIDATES if candidates else ()), *TILES]
    for head_dim, causal in classes:
        for shape in SHAPES + (LONG_KEYS if causal else ()) + (SHORT_SHAPES if short else ()):
            yield Workload.parse(f"{dtype}-{shape}-d{head_dim}" + ("-causal" if causal else ""))


def shape_of(tile: Tile | Config) -> Shape:
    """That of a tile, or of a config's."""
    if isinstance(tile, Tile):
        return tile.warpgroups, tile.block_n
    return tile.integer("warpgroups"), tile.integer("block_n")


def tiles_of(head_dim: int, causal: bool) -> tuple[Tile, ...]:
    """The tiles of a class, whether it has a table or not."""
    return TILES.get((head_dim, causal)) or CANDIDATES.get((head_dim, causal), ())


def configs(workload: Workload, device: Device) -> dict[Shape, Config]:
    """One config for each tile of the class of a workload."""
    spec = specialization(workload)
    default = family("hopper_forward").default(spec, device)
    tiles = tiles_of(workload.head_dim, workload.causal)
    return {shape_of(tile): with_tile(spec, default, tile, device) for tile in tiles}


def race(executor: Executor, compiler: Compiler, workload: Workload) -> list[dict[str, object]]:
    """One race of all tiles; a tile that fails has no row."""
    ours = configs(workload, executor.describe().device)
    outcomes = raced(
        executor, compiler, workload, ours.values(), rounds=ROUNDS, window_s=WINDOW_S, warm_s=WARM_S, settle_s=SETTLE_S
    )
    return rows_of(workload, ours, outcomes)


def times_of(rows: Iterable[Mapping[str, str]], dtype: str = "bf16") -> ByClass[Shape]:
    """The times of a file by class, of one dtype."""
    return times_by_class(rows, lambda row: (int(row["warpgroups"]), int(row["block_n"])), dtype)


def takes_long(workload: Workload, sm_count: int) -> bool:
    """Whether it is expected to take so long that load which goes on is what counts."""
    sizes, causal = Sizes.of(workload), workload.causal
    times = (tile.time(sizes, sm_count, causal=causal) for tile in tiles_of(workload.head_dim, causal))
    return min(times, default=0.0) >= SUSTAINED_US


def has_factors(workload: Workload, sm_count: int) -> bool:
    """Whether factors of its class decide, of which windows of this module's races say nothing."""
    return (workload.head_dim, workload.causal) in SUSTAINED and takes_long(workload, sm_count)


def losses(times: Times, device: Device) -> dict[Shape, list[float]]:
    """By the tile of a config: what serves shapes in its place, over the best tile of each that was raced with it."""
    return losses_of(times, device, configs, shape_of)


def served_report(rows: Iterable[Mapping[str, str]], device: Device, dtype: str) -> str:
    """A line for each tile of each class, without long launches where these have factors of their own."""
    rows = [row for row in rows if not has_factors(Workload.parse(row["workload"]), device.num_sms)]
    return "\n".join(
        f"{named(head_dim, causal)} by {64 * own[0]:3} x {own[1]:3}: {statistics.geometric_mean(lost):.3f}, "
        f"at most {max(lost):.3f}, of {len(lost)}"
        for (head_dim, causal), times in times_of(rows, dtype).items()
        for own, lost in losses(times, device).items()
    )


def named(head_dim: int, causal: bool) -> str:
    """A class in lines for people, padded."""
    return f"d{head_dim} {'causal' if causal else 'full':6}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A tile with constants of its own, and the standard deviation of the log of measured over estimated times.

    That is of shapes with fewer keys before the first query than behind it, to which all but `before` is fitted.
    """

    tile: Tile
    off_by: float

    @classmethod
    def of(cls, tile: Tile, times: Times, sm_count: int, *, causal: bool) -> Fit:
        """The constants with which a tile's times are the least off; its step is in us of one CTA."""
        shape = shape_of(tile)
        known = [(Sizes.of(workload), of[shape] - LAUNCH_MS) for workload, of in times.items() if shape in of]

        def logs(tried: Tile, *, before: bool) -> list[float]:
            return [
                math.log(ms / tried.time(sizes, sm_count, causal=causal))
                for sizes, ms in known
                if (causal and sizes.seqlen_k >= 2 * sizes.seqlen_q) is before
            ]

        best: Fit | None = None
        for overhead, lone, tail in itertools.product(
            OVERHEADS, LONE if tile.blocks_per_sm > 1 else (1.0,), TAILS if causal else (0.0,)
        ):
            tried = replace(tile, step=1.0, overhead=overhead, lone=lone, tail=tail, before=0.0)
            found = logs(tried, before=False)
            off_by = statistics.pstdev(found)
            if best is None or off_by < best.off_by:
                best = cls(tile=replace(tried, step=1e3 * math.exp(statistics.mean(found))), off_by=off_by)
        assert best is not None
        able = (replace(best.tile, before=before) for before in BEFORE)
        made = min(able, key=lambda tried: sum((log + math.log(1e3)) ** 2 for log in logs(tried, before=True)))
        return replace(best, tile=made)


def left_out(tiles: Sequence[Tile], times: Times, sm_count: int, *, causal: bool) -> list[float]:
    """For each shape the time of the tile that constants choose which were fitted without it, over the best one's."""
    found = []
    for workload, by_shape in times.items():
        others = {other: of for other, of in times.items() if other != workload}
        fits = [Fit.of(tile, others, sm_count, causal=causal).tile for tile in tiles]
        able = [tile for tile in fits if shape_of(tile) in by_shape]
        sizes = Sizes.of(workload)
        chosen = min(able, key=lambda tile: tile.time(sizes, sm_count, causal=causal))
        found.append(by_shape[shape_of(chosen)] / min(by_shape.values()))
    return found


def report(rows: Iterable[Mapping[str, str]], sm_count: int, dtype: str = "bf16") -> str:
    """The constants of every class, in the order of `tiles.CONSTANTS`, and what they are worth."""
    lines = []
    for (head_dim, causal), times in times_of(rows, dtype).items():
        raced_tiles = {shape for of in times.values() for shape in of}
        tiles = [tile for tile in tiles_of(head_dim, causal) if shape_of(tile) in raced_tiles]
        if not tiles or len(times) < 2:  # one shape says nothing of others
            continue
        for tile in tiles:
            fit = Fit.of(tile, times, sm_count, causal=causal)
            made = fit.tile
            lines.append(
                f"{named(head_dim, causal)} {64 * tile.warpgroups:3} x {tile.block_n:3}: "
                f"({made.step:.3f}, {made.overhead:g}, {made.lone:g}, {made.tail:g}, {made.before:g}), "
                f"off by {fit.off_by:.1%}"
            )
        ratios = left_out(tiles, times, sm_count, causal=causal)
        lines.append(f"  left out: {statistics.geometric_mean(ratios):.3f}, at most {max(ratios):.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    options = _parser().parse_args(arguments)
    if options.fit or options.served:
        rows, device = read(options.file), find_device(options.target)
        if options.fit:
            print(report(rows, device.num_sms, options.dtype))
        if options.served:
            print(served_report(rows, device, options.dtype))
        return 0
    found = workloads(candidates=options.candidates, short=options.short, dtype=options.dtype)
    return race_all(options, lambda device: found, race)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.tiles", description=(__doc__ or "").split("\n")[0])
    add_race_arguments(parser, fit="print constants instead")
    parser.add_argument("--served", action="store_true", help="print what the tiles that serve take instead")
    parser.add_argument("--candidates", action="store_true", help="race tiles of classes without a table, too")
    parser.add_argument("--short", action="store_true", help="race shapes of few queries, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
