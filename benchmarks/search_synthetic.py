"""Synthetic tables: search spaces that are real with times that are made up, for tests of the bench alone.

Each family has a best value of each knob, costs of the values around it, knobs that matter together, a ruggedness that
no model of knobs explains, and configs that spill; measurements have noise and a drift that the reference shares. The
sizes of these are guesses in the spirit of what searches have met (`tuning/levels.py`, docs/tuning.md). Nothing of this
was measured: the host of such a table is called `synthetic`, and none ships.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random

from flashgen.codegen.family import Knob
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement, Trial
from flashgen.core.search_log import SearchLog, SearchRun
from flashgen.core.workload import Workload
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.lattice import FamilySpace

HOST = "synthetic"
REFERENCE_MS = 0.7
NOISE, DRIFT = 0.006, 0.02
"""Of a window, and of the clock over a search."""

RUGGED = 0.03
SPILLING = 0.08
MAIN, JOINT = 0.06, 0.04
"""Deviations of the log of a time that the values of a knob, and those of two knobs together, make."""

USUAL = 0.6
"""How often a family's default has the best value of a knob."""

COMPILE_S, EVALUATE_S = 2.0, 0.25


def synthetic(
    workload: Workload, device: Device, *, seed: int = 0, families: tuple[str, ...] = (), most: int = 400
) -> SearchLog:
    """A table of at most `most` valid configs, chosen at random where there are more."""
    candidates = Candidates.of(workload, device, families)
    every = [(space, config) for space in candidates.spaces for config in space.configs]
    chosen = random.Random(seed).sample(every, min(most, len(every)))
    models = {
        space.family: _Model(space, default, f"{seed}/{workload.key}")
        for space, default in zip(candidates.spaces, candidates.defaults, strict=True)
    }
    search = SearchRun(
        workload=workload,
        device=device,
        run=f"synthetic-{seed}",
        host=HOST,
        candidates=len(every),
        settings=(("families", " ".join(sorted(models))), ("kind", "every" if len(chosen) == len(every) else "sample")),
    )
    unit_ms = workload.flops / 500e9
    trials = (
        _trial(search, config, number, models[space.family], unit_ms)
        for number, (space, config) in enumerate(chosen, 1)
    )
    return SearchLog(search=search, trials=tuple(trials))


class _Model:
    """The log of a time for each config of a family, 0 for the best one that knobs alone would make."""

    def __init__(self, space: FamilySpace, default: Config, seed: str) -> None:
        self._seed = f"{seed}/{space.family}"
        self._knobs = [knob for knob in space.knobs if len({config[knob.name] for config in space.configs}) > 1]
        dice = random.Random(self._seed)
        self._behind = 0.25 * dice.random()
        self._pairs = [pair for pair in itertools.combinations(self._knobs, 2) if dice.random() < 0.3]
        self._weights = {knob.name: MAIN * math.exp(dice.gauss(0, 0.7)) for knob in self._knobs}
        self._tops = {
            knob.name: knob.values.index(default[knob.name])
            if dice.random() < USUAL
            else dice.randrange(len(knob.values))
            for knob in self._knobs
        }

    def log_ms(self, config: Config) -> float:
        total = self._behind + RUGGED * abs(_normal(self._seed, config.to_json()))
        for knob in self._knobs:
            total += self._weights[knob.name] * self._cost(knob, config)
        for one, other in self._pairs:
            cell = f"{one.name}={config[one.name]}/{other.name}={config[other.name]}"
            total += JOINT * max(0.0, _normal(self._seed, cell))
        return total

    def spills(self, config: Config) -> bool:
        return _chance(self._seed, "spills", config.to_json()) < SPILLING

    def _cost(self, knob: Knob, config: Config) -> float:
        """0 at the best value; of numbers the farther the more, of words as it comes."""
        step, top = knob.values.index(config[knob.name]), self._tops[knob.name]
        if all(type(value) is int for value in knob.values):
            return abs(step - top) / max(1, len(knob.values) - 1) * 2
        return 0.0 if step == top else _chance(self._seed, knob.name, str(step))


def _trial(search: SearchRun, config: Config, number: int, model: _Model, unit_ms: float) -> Trial:
    spills = model.spills(config)
    compiled = Compiled(
        registers=255 if spills else 168,
        spills=64 if spills else 0,
        shared_bytes=2**16,
        occupancy=1,
        compile_ms=1e3 * COMPILE_S * (0.5 + _chance("compile", config.to_json())),
    )
    drift = 1 + DRIFT * math.sin(number / 9)
    time_ms = unit_ms * math.exp(model.log_ms(config)) * drift
    windows = tuple(time_ms * math.exp(NOISE * _normal(search.run, f"{number}/{part}")) for part in range(3))
    return Trial(
        workload=search.workload,
        device=search.device,
        config=config,
        source="random",
        outcome=Failure(stage="resources", reason="synthetic")
        if spills
        else Measurement(times_ms=windows, reference_ms=REFERENCE_MS * drift),
        run=search.run,
        number=number,
        compiled=compiled,
        evaluate_s=None if spills else EVALUATE_S,
    )


def _chance(*parts: str) -> float:
    return int(hashlib.sha256("/".join(parts).encode()).hexdigest()[:8], 16) / 2**32


def _normal(*parts: str) -> float:
    """One number of a normal distribution for each text (Box and Muller)."""
    radius = math.sqrt(-2 * math.log(max(_chance(*parts, "radius"), 1e-12)))
    return radius * math.cos(2 * math.pi * _chance(*parts, "angle"))
