"""What a call without a record loses, by the searches that ship: each record is left out in turn; needs no GPU.

python -m benchmarks.left_out [--device h200] [--worst 20]

The ladder is asked what would serve the workload of a record if nobody had measured it: neither this GPU, nor any other
one of its architecture whose records ship. Where the searches of the workload tried what it says, its time over that of
the record's config counts. Searches time a config in short windows, so that one ratio may be off by several per cent;
the mean of many is what a change of the ladder is judged by (`benchmarks.fallback` races shapes on a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import table_row
from benchmarks.provenance import ROOT
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Specialization, Workload
from flashgen.db.layers import Found, Layers
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.ladder import Served, resolve
from flashgen.runtime.lookup.records import Records
from flashgen.tuning.regrets import FAILED, Known, known_of

SEARCHES = ROOT / "benchmarks/searches"


class Forgetful(Records):
    """All records but those of one workload, or those that one GPU has of it."""

    def __init__(self, layers: Layers, forgotten: Workload, device: Device | None = None) -> None:
        super().__init__(layers)
        self._forgotten, self._whose = forgotten, device

    def of(self, spec: Specialization, device: Device) -> tuple[Found, ...]:
        """See `Records`."""
        return tuple(each for each in super().of(spec, device) if not self._is_forgotten(each))

    def _is_forgotten(self, found: Found) -> bool:
        record, _ = found
        mine = self._whose is None or self._whose.may_use(record.device)
        return mine and record.workload == self._forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What would serve the workload of a record without it, and its time over that of the record's config, if known."""

    workload: Workload
    winner: Config
    served: Served
    ratio: float | None


def left_out(layers: Layers, known: Iterable[Known], device: Device, *, whose: Device | None = None) -> list[LeftOut]:
    """Each workload with a record, but those whose lengths are a profile's; `whose` records are left out, or all."""
    found = []
    for each in known:
        workload = each.workload
        if each.winner is None or workload.has_profiles or workload.is_decode:
            continue
        spec = specialization(workload)
        served = resolve(workload, spec, device, Forgetful(layers, workload, whose))
        found.append(
            LeftOut(
                workload=workload, winner=each.winner, served=served, ratio=_ratio(each, served.config, each.winner)
            )
        )
    return found


def _ratio(known: Known, served: Config, winner: Config) -> float | None:
    if served == winner:
        return 1.0
    time, best = known.ratios.get(served, FAILED), known.ratios.get(winner, FAILED)
    return time / best if time < FAILED > best else None


def known_on(layers: Layers, device: Device) -> list[Known]:
    """What the records of a GPU and the searches of it that ship say."""
    records = [record for record, _ in layers.records(device=device, provenance="measured")]
    files = (sorted(folder.glob(f"*{SUFFIX}")) for folder in sorted(SEARCHES.iterdir()))
    logs = [read_log(path) for paths in files if paths and _is_of(paths[0], device) for path in paths]
    return known_of(records, logs, device)


def _is_of(path: Path, device: Device) -> bool:
    search = read_log(path).search
    return search is not None and device.may_use(search.device)


def page(found: Sequence[LeftOut]) -> str:
    """A table of the passes."""
    lines = [table_row(("pass", "records", "known", "mean", "above 1.03", "most")), table_row(("---",) * 6)]
    for name in ("forward", "backward", "all"):
        mine = [each for each in found if name in (each.workload.direction, "all")]
        ratios = [each.ratio for each in mine if each.ratio is not None]
        if ratios:
            mean, most = statistics.geometric_mean(ratios), max(ratios)
            above = sum(ratio > 1.03 for ratio in ratios)
            cells = (name, str(len(mine)), str(len(ratios)), f"{mean:.3f}", str(above), f"{most:.3f}")
            lines.append(table_row(cells))
    return "\n".join(lines)


def line_of(each: LeftOut) -> str:
    """One workload for people: what differs from what its record has."""
    own, winner = dict(each.served.config.knobs), dict(each.winner.knobs)
    if each.served.config.family != each.winner.family:
        differs = f"{each.served.config.family} for {each.winner.family}"
    else:
        differs = ", ".join(
            f"{name} {own.get(name)} for {value}" for name, value in winner.items() if own.get(name) != value
        )
    return f"{each.ratio or 0:.3f} {each.workload.key}, rung {each.served.rung}: {differs}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables, and the workloads that lose most."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.left_out", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="h200", help="whose records (%(default)s)")
    parser.add_argument("--worst", type=int, default=10, help="workloads that are listed (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
        with Layers.open() as layers:
            known = known_on(layers, device)
            by_nobody = left_out(layers, known, device)
            here = left_out(layers, known, device, whose=device)
    except FlashgenError as error:
        parser.error(str(error))
    print(f"{device.name}: left out as if no GPU had a record of the workload\n\n{page(by_nobody)}\n")
    for each in sorted(by_nobody, key=lambda each: -(each.ratio or 0))[: options.worst]:
        print(line_of(each))
    print(f"\nas if this GPU alone had none\n\n{page(here)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
