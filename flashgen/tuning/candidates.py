"""What a search starts from: the valid sets of the families that apply, and the configs to try first."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flashgen.codegen.cost import Ranking
from flashgen.codegen.families import (
    applicable,
    balanced,
    beside,
    family,
    fitted,
    invalid,
    over_pages,
    poor_at_sizes,
    usual,
)
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_packing import suits_group
from flashgen.core.collection import CollectionPaused
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError
from flashgen.core.nearest import distance, pages_apart, position
from flashgen.core.record import TuningRecord
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning.finals import complexity, rows_and_keys
from flashgen.tuning.lattice import FamilySpace
from flashgen.tuning.predict import cost_model, estimate, predict_all
from flashgen.tuning.seed_lists import Lists, as_valid, generated

TIE = 0.005
"""Predictions closer than this share are equal, and the simpler config goes first."""

FAR = 1.5
"""A tile predicted to be slower than this many times the best, or to spill, waits until others had several variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The valid sets of a workload on a device, and the default config of each family, preferred first."""

    spaces: tuple[FamilySpace, ...]
    defaults: tuple[Config, ...]

    @classmethod
    def of(cls, workload: Workload, device: Device, families: tuple[str, ...] = ()) -> Candidates:
        """Enumerate them; of these families alone, where any are named.

        Raises:
            UnsupportedError: no family applies; the message has every family's reason. Or there is nothing to compute.
        """
        if not workload.flops:
            raise UnsupportedError(f"what is tuned has queries that see keys; {workload.key} has none")
        with CollectionPaused():  # tens of thousands of configs, of which none is garbage
            return _candidates(specialization(workload), device, families).fitted_to(workload, device)

    def fitted_to(self, workload: Workload, device: Device) -> Candidates:
        """The same with what becomes of each config at the sizes of a workload, where that is another one.

        Of some nothing valid does: with more query rows one warp of a step of decoding has too few registers.
        """
        spec, sizes = specialization(workload), Sizes.of(workload)

        def all_fitted(configs: tuple[Config, ...]) -> tuple[Config, ...]:
            known = set(configs)
            found = dict.fromkeys(fitted(config, spec, sizes, device) for config in configs)
            return tuple(one for one in found if one in known or invalid(one, spec, device) is None)

        def others(configs: tuple[Config, ...]) -> tuple[Config, ...]:
            if workload.is_decode:
                return ()  # those for smaller batches are wrong
            if workload.direction == "backward":
                return tuple(config for config in configs if poor_at_sizes(config, sizes) is None)
            return configs

        def all_of(space: FamilySpace) -> tuple[Config, ...]:
            configs = tuple(one for one in space.configs if not workload.is_packed or suits_group(one, sizes))
            return tuple(dict.fromkeys((*_of(space, defaults), *all_fitted(configs), *others(configs))))

        defaults = tuple(usual(config, spec, sizes, device) for config in self.defaults)
        spaces = (replace(space, configs=all_of(space)) for space in self.spaces)
        return Candidates(spaces=tuple(spaces), defaults=defaults)

    @property
    def default(self) -> Config:
        """The config that serves without any record."""
        return self.defaults[0]

    @property
    def count(self) -> int:
        """Valid configs of all families together."""
        return sum(len(space.configs) for space in self.spaces)


def _of(space: FamilySpace, configs: Iterable[Config]) -> tuple[Config, ...]:
    return tuple(config for config in configs if config.family == space.family)


@functools.lru_cache(maxsize=16)
def _candidates(spec: Specialization, device: Device, families: tuple[str, ...]) -> Candidates:
    rows = applicable(spec, device, families)
    return Candidates(
        spaces=tuple(FamilySpace.of(row, spec, device) for row in rows),
        defaults=tuple(row.default(spec, device) for row in rows),
    )


def related(spec: Specialization) -> tuple[str, ...]:
    """The classes whose records a search begins with: its own, and those whose winners are much the same.

    They are those with or without determinism, and for a pass over pages those with other pages and with none.
    """
    if spec.page_size and spec.varlen:
        plain = replace(spec, page_size=None).workload_class
        return tuple(dict.fromkeys((spec.workload_class, *spec.page_classes, plain)))
    if spec.direction != "backward":
        return (spec.workload_class,)
    return spec.workload_class, replace(spec, deterministic=not spec.deterministic).workload_class


def nearest(records: Iterable[TuningRecord], workload: Workload, device: Device, most: int) -> tuple[Config, ...]:
    """Different configs of the records nearest to `workload`: this device first, then its architecture, then the rest.

    Shapes are compared as `flashgen.core.nearest` says; measured records go before predicted ones, and those with as
    large pages before others. Configs are fitted to the sizes of the workload, and to pages where it alone has them.
    """
    here, spec, sizes = position(workload), specialization(workload), Sizes.of(workload)

    def far(record: TuningRecord) -> tuple[object, ...]:
        same_device = device.may_use(record.device)
        return (
            not same_device,
            record.device.arch != device.arch,
            record.provenance != "measured",
            record.workload.page_size is None,
            distance(position(record.workload), here) + pages_apart(record.workload.page_size, workload.page_size),
            record.workload.key,
        )

    def adapted(record: TuningRecord) -> Config:
        is_borrowed = spec.varlen and spec.page_size and record.workload.page_size is None
        return over_pages(record.config, spec, device) if is_borrowed else record.config

    found = (fitted(adapted(record), spec, sizes, device) for record in sorted(records, key=far))
    return tuple(dict.fromkeys(found))[:most]


def by_prediction(configs: Sequence[Config], default: Config, workload: Workload, device: Device) -> list[Config]:
    """Configs of the families that the model ranks, in the order in which they are worth a compile.

    The best variant of each tile comes before the second best of any, so that a small budget meets different kernels.
    """
    times = predict_all(workload, [config for config in configs if ranking(config) is not None], device)
    if not times:
        return []
    limit = FAR * min(times.values())
    ranks = {c: (round(math.log(time) / TIE), complexity(c, default)) for c, time in times.items()}
    variants: Counter[tuple[object, ...]] = Counter()
    turn: dict[Config, int] = {}
    for config in sorted(times, key=lambda c: ranks[c]):
        tile = (config.family, *tile_of(config))
        later = 8 if times[config] > limit else 3 if _spills(config, workload, device) else 0
        turn[config] = variants[tile] + later
        variants[tile] += 1
    return sorted(times, key=lambda c: (turn[c], ranks[c]))


def ranking(config: Config) -> Ranking | None:
    """By which knobs the model tells candidates of a config's family apart, or None where it does not."""
    model = cost_model(config)
    return model.ranking if model else None


def tile_of(config: Config) -> tuple[KnobValue, ...]:
    """The values of a ranked config that make its tile, in the order of their knobs' names."""
    ranked = ranking(config)
    return tuple(value for name, value in config.knobs if ranked and name in ranked.tile_knobs)


def _won(candidates: Candidates, spec: Specialization, sizes: Sizes, device: Device, lists: Lists) -> Sequence[Config]:
    """The learned list of a class, or the hand-written ones of the families, as they fit the sizes."""
    names = {space.family for space in candidates.spaces}
    learned = lists(spec, device)
    if learned is not None:
        able = [config for config in as_valid(learned, spec, sizes, device) if config.family in names]
        if able or not learned:
            return able
    by_hand = (each for space in candidates.spaces for each in family(space.family).seed_configs(spec, device))
    return [fitted(config, spec, sizes, device) for config in by_hand]


def _spills(config: Config, workload: Workload, device: Device) -> bool:
    """Whether a config is expected to be rejected once it is compiled."""
    return estimate(workload, config, device).spills > family(config.family).tolerated_spills


def _other_tiles(candidates: Candidates, spec: Specialization, sizes: Sizes, device: Device) -> list[Config]:
    """What the default has at other sizes, one config of each tile, in the order of tiles that would serve these sizes.

    Lists have the tiles that won, and of a class with few records those of few sizes: all of packed sequences of d64
    had 256 rows, where 64 took 0.8 to 1.07 of their time, by how long sequences were.
    """
    by_tile = {rows_and_keys(candidates.default): candidates.default}
    for config in as_valid(beside(candidates.default, spec, device), spec, sizes, device):
        for found in (balanced(config, spec, sizes, device), config):
            by_tile.setdefault(rows_and_keys(found), found)
    return list(by_tile.values())[1:]


def seed_configs(
    candidates: Candidates, workload: Workload, device: Device, most: int, lists: Lists = generated
) -> list[tuple[Config, str]]:
    """Defaults of other families, what won before, other tiles of a default, then the model's, each with its source.

    What won before is in the list that was learned for the device, or in those that are written by hand: where there is
    none, and where none of its configs is of these families. Those that the model likes have different tiles, and are
    else as their default.
    """
    spec, sizes = specialization(workload), Sizes.of(workload)
    found = [(config, "default") for config in candidates.defaults[1:]]
    found += [(config, "seed") for config in _won(candidates, spec, sizes, device, lists)]
    found += [(config, "default") for config in _other_tiles(candidates, spec, sizes, device)]
    for space, default in zip(candidates.spaces, candidates.defaults, strict=True):
        ranked = ranking(default)
        if ranked is None:
            continue
        rest = [name for name, _ in default.knobs if name not in (*ranked.tile_knobs, *ranked.stage_knobs)]
        configs = [config for config in space.configs if all(config[name] == default[name] for name in rest)]
        found += [(config, "model") for config in by_prediction(configs, default, workload, device)[:most]]
    return found
