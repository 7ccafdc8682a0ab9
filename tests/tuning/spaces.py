"""A synthetic space shaped like a real one, with a rugged, partly failing time model that needs no GPU."""

from __future__ import annotations

import hashlib
import itertools
import math

from flashgen.codegen.family import Knob
from flashgen.core.config import Config
from flashgen.core.record import Failure, Measurement
from flashgen.tuning.lattice import FamilySpace

KNOBS = tuple(
    Knob(name=name, values=values, meaning="")
    for name, values in {
        "block_m": (64, 128, 256),
        "block_n": (32, 64, 128, 256),
        "heads": (1, 8, 0),
        "heavy": (False, True),
        "loads": ("pointer", "descriptor"),
        "maxnreg": (0, 128, 168, 255),
        "num_stages": (1, 2, 3, 4),
        "num_warps": (4, 8, 16),
    }.items()
)


def space(family: str = "rugged") -> FamilySpace:
    """About four thousand valid points of nearly seven thousand."""
    names = [knob.name for knob in KNOBS]
    rows = (dict(zip(names, row, strict=True)) for row in itertools.product(*(knob.values for knob in KNOBS)))
    configs = tuple(Config.of(family, row) for row in rows if row["block_m"] * row["block_n"] <= 128 * 256)  # type: ignore[operator]
    return FamilySpace(family=family, knobs=KNOBS, configs=configs)


def time_ms(config: Config, surface: int = 0) -> float:
    """A smooth trend with interactions, times up to 25 per cent of unexplained ruggedness."""
    block_m, block_n, num_warps = (config.integer(name) for name in ("block_m", "block_n", "num_warps"))
    time = 1 + 0.5 * abs(math.log2(block_m / 128)) + 0.35 * abs(math.log2(block_n / 64))
    time *= 1 + 0.25 * abs(math.log2(num_warps * 16 / block_m))
    descriptor = config["loads"] == "descriptor"
    time *= (1 if descriptor else 1.12) * (
        1 + 0.08 * abs(config.integer("num_stages") - 3) * (2 if descriptor else 0.5)
    )
    time *= 1.3 if config["maxnreg"] == 128 and block_m * block_n > 8192 else 1
    time *= (1 if config["heavy"] else 1.05) * (1 if config["heads"] == 8 else 1.03)
    return time * (1 + 0.25 * _chance("time", surface, config))


def outcome(config: Config, surface: int = 0, failing: float = 0.15) -> Measurement | Failure:
    """The time of a config, or the failure that a share of them has."""
    if _chance("failure", surface, config) < failing:
        return Failure(stage="build", reason="planted")
    return Measurement(times_ms=(time_ms(config, surface),))


def _chance(*parts: object) -> float:
    text = "/".join(str(part) for part in parts)
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
