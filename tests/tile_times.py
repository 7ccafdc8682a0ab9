"""Times of tiles on an H200, which are read once for all classes."""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks.search_files import read
from benchmarks.tile_races import ByClass
from benchmarks.tiles import times_of

TIMES = Path(__file__).parent / "codegen/tiles_nvidia_h200.csv"


@functools.cache  # nobody changes them
def tile_times() -> ByClass[tuple[int, int]]:
    """The time of each tile, warpgroups and block_n, of each workload of a class, head_dim and causal."""
    return times_of(read(TIMES))
