"""How full the tiles of packed sequences are, beside those of a dense call: what their rate can be at most; no GPU.

python -m benchmarks.packed_tiles [--device h200] [--results benchmarks/results/nvidia_h200/varlen.csv]

A warpgroup computes 64 rows and whole blocks of keys, wherever a sequence ends. The visible pairs of a batch over
all that its tiles compute say how full they are; how full they are over how full those of the dense call are (both with
the config that serves) is the rate that two equally fast kernels have to each other. Forward passes of the Hopper
family; `varlen.csv` has the rates that were measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.markdown import table_row
from benchmarks.results import RESULTS, Row, read_rows
from benchmarks.varlen_cases import PACKS, SUITE
from flashgen.codegen.hopper_forward.resources import ROWS, packed_heads, tile_rows
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.packed_ladder import served_pass
from flashgen.runtime.lookup.records import Records

GOAL = 0.97


class Tiles(NamedTuple):
    """Those of the config that serves a workload, and the visible share of what they compute."""

    workload: Workload
    shape: str
    share: float

    @classmethod
    def of(cls, workload: Workload, device: Device, records: Records) -> Tiles:
        """Ask the ladder."""
        config = served_pass(workload, specialization(workload), device, records).config
        heads = packed_heads(config)
        rows = f"({heads} x {ROWS // heads})" if heads > 1 else f"{ROWS}"
        shape = f"{config['warpgroups']} x {rows} x {config['block_n']}"
        return cls(workload, shape, visible_share(config, workload))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """The tiles of a batch and of its dense call, and the measured rate of the one to the other."""

    packed: Tiles
    dense: Tiles
    rate: float

    @property
    def most(self) -> float:
        """The rate to the dense call that its tiles leave."""
        return self.packed.share / self.dense.share

    @property
    def reached(self) -> float:
        """The share of it that was measured; above 1 where the packed kernel is the faster one."""
        return self.rate / self.most


def visible_share(config: Config, workload: Workload) -> float:
    """The visible pairs of a workload without a window over all that its tiles of `hopper_forward` compute."""
    shared, block = packed_heads(config), config.integer("block_n")
    group = workload.nheads // workload.nheads_k
    rows, own = tile_rows(config) // shared, ROWS // shared
    computed = 0
    for seqlen_q, seqlen_k in zip(workload.each_seqlen_q, workload.each_length, strict=True):
        # warpgroups of packed sequences pass over tiles in which they have no row
        end = seqlen_q if workload.varlen else -(-seqlen_q // rows) * rows
        for first in range(0, end, own):
            # one that skips blocks ends with its own last row, else with the tile's
            last = first + own if config["hidden_blocks"] == "skipped" else (first // rows + 1) * rows
            seen = min(max(last + seqlen_k - seqlen_q, 0), seqlen_k) if workload.causal else seqlen_k
            computed += own * -(-seen // block) * block
    # of an incomplete pack rows are empty
    return workload.all_pairs / computed * group / (-(-group // shared) * shared)


def rates_beside_dense(rows: Iterable[Row], suite: str = SUITE) -> dict[str, float]:
    """By the key of each batch of a suite that has a dense call: its TFLOP/s over those of that call."""
    speeds = {(row.workload, row.impl): row.tflops for row in rows if row.suite == suite and row.tflops}
    return {
        key: speed / speeds[key, "flashgen-dense"]
        for (key, impl), speed in speeds.items()
        if impl == "flashgen" and (key, "flashgen-dense") in speeds
    }


def filled(device: Device, records: Records, rates: dict[str, float]) -> Iterator[Filled]:
    """Each forward batch of the benchmark whose rate beside a dense call is known."""
    for pack in PACKS:
        if pack.trains or pack.workload.key not in rates:
            continue
        packed, dense = (Tiles.of(workload, device, records) for workload in (pack.workload, pack.dense))
        yield Filled(packed=packed, dense=dense, rate=rates[pack.workload.key])


def page(found: Sequence[Filled]) -> str:
    """A table in Markdown, and how many batches reach the goal of what their tiles leave."""
    head = ["batch", "tile", "full", "dense call", "tile", "full", "at most", "measured", "of it"]
    lines = [table_row(head), table_row(["---"] * 5 + ["---:"] * 4)]
    for each in found:
        packed, dense, call = each.packed, each.dense, each.dense.workload
        cells = [
            packed.workload.key,
            packed.shape,
            f"{packed.share:.2f}",
            f"{call.batch} x {call.seqlen_q}",
            dense.shape,
        ]
        figures = (dense.share, each.most, each.rate, each.reached)
        lines.append(table_row([*cells, *(f"{value:.2f}" for value in figures)]))
    near = sum(each.reached >= GOAL for each in found)
    return "\n".join([*lines, "", f"{near} of {len(found)} batches reach {GOAL} of what their tiles leave."]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packed_tiles", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", default="h200", help="whose records serve (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS / "nvidia_h200/varlen.csv")
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
        rates = rates_beside_dense(read_rows(options.results))
        with Layers.open() as layers:
            print(page(list(filled(device, Records(layers), rates))), end="")
    except (FlashgenError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
