"""Strategies of Kernel Tuner on a replay table, by its own interface for searches that are simulated from a cache file.

A strategy runs to its end when a contestant is made, and is then asked for what it tried, in its order. It is told the
same times as everybody, failures as failed configs, and knows the space: all knobs that vary, those of other families
being `none`, and which combinations of them the table has. It measures one config after the other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import random
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.search_replay import Asking, Outcome, Table
from flashgen.core.config import Config
from flashgen.core.record import Failure

STRATEGIES = ("genetic_algorithm", "simulated_annealing", "hybrid_vndx", "adaptive_tabu_greywolf", "bayes_opt")
"""Of Kernel Tuner 1.5. `greedy_ils` does not end where nothing is left around what it found, and `diff_evo` fails on
families of different knobs."""

MOST_POINTS = 2**21
"""Combinations of all values, valid or not, that Kernel Tuner has to go through before a strategy starts."""

NEEDED = ("kernel_tuner", "numpy", "sklearn")

FAILED = "RuntimeFailedConfig"
"""What Kernel Tuner writes in place of the time of a config that failed."""


class Played:
    """What a strategy tried, one after the other."""

    ahead: int | None = 1

    def __init__(self, table: Table, seed: int, strategy: str, evaluations: int = 100) -> None:
        """Run `strategy` for so many evaluations."""
        self._left = iter(_tried(table, seed, strategy, min(evaluations, len(table.answers))))

    def ask(self) -> Config | None:
        """See `Asking`."""
        return next(self._left, None)

    def tell(self, config: Config, outcome: Outcome) -> None:
        """It was told before."""


def kernel_tuner_contestants() -> tuple[dict[str, Callable[[Table, int], Asking]], dict[str, str]]:
    """A contestant for each strategy, by name; or why there is none."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        return {}, {"Kernel Tuner": f"{', '.join(missing)} is not installed"}
    return {f"Kernel Tuner {name}": partial(Played, strategy=name) for name in STRATEGIES}, {}


def _tried(table: Table, seed: int, strategy: str, evaluations: int) -> list[Config]:
    import numpy as np
    from constraint import FunctionConstraint  # of Kernel Tuner
    from kernel_tuner import tune_kernel

    knobs = _knobs(table)
    points = {_point(config, knobs): config for config in table.answers}
    random.seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.json"
        path.write_text(json.dumps(_cache(table, knobs, points)))
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results, _ = tune_kernel(
                "attention",
                "",
                (1,),
                [],
                knobs,
                restrictions=[FunctionConstraint(lambda *values: values in points)],
                strategy=strategy,
                strategy_options={"max_fevals": evaluations},
                cache=str(path),
                simulation_mode=True,
                quiet=True,
            )
    tried = (points[tuple(result[name] for name in knobs)] for result in results)
    return list(dict.fromkeys(tried))


def _knobs(table: Table) -> dict[str, list[Any]]:
    """The values of each knob that varies, and of the families.

    Raises:
        ValueError: they have too many combinations.
    """
    values: dict[str, set[Any]] = {"family": {config.family for config in table.answers}}
    for config in table.answers:
        for name, value in config.knobs:
            values.setdefault(name, set()).add(_plain(value))
    for config in table.answers:
        for name in values.keys() - {"family", *dict(config.knobs)}:
            values[name].add("none")
    found = {
        name: sorted(each, key=lambda v: (isinstance(v, str), v)) for name, each in values.items() if len(each) > 1
    }
    size = math.prod(len(each) for each in found.values())
    if size > MOST_POINTS:
        raise ValueError(f"Kernel Tuner goes through at most {MOST_POINTS} combinations here, {table.name} has {size}")
    return found


def _point(config: Config, knobs: dict[str, list[Any]]) -> tuple[Any, ...]:
    own = {"family": config.family, **dict(config.knobs)}
    return tuple(_plain(own.get(name, "none")) for name in knobs)


def _plain(value: int | str | bool) -> int | str:
    return int(value) if isinstance(value, bool) else value


def _cache(table: Table, knobs: dict[str, list[Any]], points: dict[tuple[Any, ...], Config]) -> dict[str, Any]:
    """The table in the format of Kernel Tuner's cache files."""
    cache = {}
    for point, config in points.items():
        answer = table.answers[config]
        entry: dict[str, Any] = dict(zip(knobs, point, strict=True))
        if isinstance(answer.outcome, Failure):
            entry |= {"time": FAILED, "__error__": FAILED}
        else:
            entry["time"] = answer.outcome.median_ms
        entry |= {"compile_time": 1e3 * answer.compile_s, "benchmark_time": 1e3 * answer.evaluate_s}
        cache[",".join(map(str, point))] = {**entry, "verification_time": 0.0, "GFLOP/s": 0.0}
    return {
        "device_name": table.device.name,
        "kernel_name": "attention",
        "problem_size": [1],
        "tune_params_keys": list(knobs),
        "tune_params": knobs,
        "objective": "time",
        "cache": cache,
    }
