"""What a search tries before its own proposals, in order, and who names it: one of `core.record.SOURCES`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashgen.codegen.families import successor
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates, nearest, seed_configs
from flashgen.tuning.context import Options
from flashgen.tuning.seed_lists import Lists, generated

Start = tuple[Config, str]
"""A config to try, and its source."""


def starting_points(
    candidates: Candidates,
    workload: Workload,
    device: Device,
    options: Options,
    *,
    known: Sequence[TuningRecord] = (),
    incumbent: Config | None = None,
    lists: Lists = generated,
) -> list[Start]:
    """The default, what is served today, the nearest records' configs, the lists, other tiles and what the model likes.

    Args:
        candidates: those of the workload on the device.
        workload: what is searched for.
        device: where it is measured.
        options: how many of each; `from_nothing` leaves the incumbent alone.
        known: records of its class, of families among the candidates.
        incumbent: the config that is served today.
        lists: what won before, by class; those that were learned for the device unless others are given.
    """
    served = [] if incumbent is None else [(incumbent, "incumbent")]
    if options.from_nothing:
        return _succeeded(served, workload)
    near = nearest(known, workload, device, options.neighbours)
    first = [(candidates.default, "default"), *served, *((config, "neighbour") for config in near)]
    return _succeeded(first, workload) + seed_configs(candidates, workload, device, options.seed_configs, lists)


def _succeeded(starts: Iterable[Start], workload: Workload) -> list[Start]:
    """With the configs of today in place of those that another one took the place of."""
    spec = specialization(workload)
    return [(successor(config, spec), source) for config, source in starts]
