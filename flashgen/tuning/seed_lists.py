"""Lists of configs that a search begins with, as they were learned from tables and records of a device.

`tuning_db/<device>/seed_configs.json` has a list for each class of workloads (`seed_class`), and says of each whether
it serves or the families' hand-written lists do. A device without a file takes that of its architecture.
`tuning.learned_seeds` writes them.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen.families import fitted, invalid, successor, validate
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import tile_side
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError, TuningError
from flashgen.core.keys import SHORT
from flashgen.core.quoting import printable, shown
from flashgen.core.settings import shipped
from flashgen.core.workload import DECODE, Specialization

FILE = "seed_configs.json"
VERSION = 1

GENERATED, HAND = "generated", "hand"
"""Whose list serves a class: the one of the file, or those of the families."""

LEAST_WIDTH = 64
"""Columns of the narrowest class of heads: narrower ones lie in tiles of as many."""

SIXTEEN_BITS = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedLists:
    """The lists of one file that serve, by class, and the device that they were learned for."""

    identity: str
    arch: str
    classes: Mapping[str, tuple[Config, ...]]


def seed_class(spec: Specialization) -> str:
    """The class of workloads that share a list, e.g. `fwd-16bit-d128-causal`: no family is in it.

    It has the direction, the kind of the elements, the wider side of a head in columns of its tile, the mask (full,
    causal, or a window, which may be causal, too; of decoding these are numbers of a launch), and what else changes a
    kernel's body: a softcap, tiles of a bias or a mask beside the scores, packed sequences.
    """
    dtype = "16bit" if spec.dtype in SIXTEEN_BITS else spec.dtype
    width = max(LEAST_WIDTH, tile_side(spec.head_dim), tile_side(spec.head_dim_v))
    parts = [SHORT[spec.direction], dtype, f"d{width}"]
    if spec.direction != DECODE:
        parts.append("window" if spec.window else "causal" if spec.causal else "full")
    body = {"softcap": spec.softcap, "scores": bool(spec.bias or spec.mask), "varlen": spec.varlen}
    return "-".join([*parts, *(name for name, is_there in body.items() if is_there)])


Lists = Callable[[Specialization, Device], "Sequence[Config] | None"]
"""A list to begin with, or None where the hand-written ones of the families serve."""


def generated(spec: Specialization, device: Device) -> Sequence[Config] | None:
    """The list that was learned for the class of a specialization, or None; as `Lists`."""
    return shipped_lists(device).get(seed_class(spec))


def by_hand(spec: Specialization, device: Device) -> Sequence[Config] | None:
    """None: the hand-written lists serve; as `Lists`."""
    return None


def as_valid(configs: Sequence[Config], spec: Specialization, sizes: Sizes, device: Device) -> Iterator[Config]:
    """Each config as it serves a workload today, once; what is not valid for it is left out."""
    found = dict.fromkeys(
        fitted(today, spec, sizes, device)
        for today in (successor(config, spec) for config in configs)
        if invalid(today, spec, device) is None
    )
    return iter(found)


def shipped_lists(device: Device) -> Mapping[str, tuple[Config, ...]]:
    """The lists that ship for a device: its own, else those of a device of its architecture; else none.

    A file that cannot be read is left out with one warning.
    """
    return _lists_in(shipped("tuning_db"), device)


@functools.lru_cache(maxsize=16)
def _lists_in(folder: Path, device: Device) -> Mapping[str, tuple[Config, ...]]:
    files = (_read_or_warn(path) for path in sorted(folder.glob(f"*/{FILE}")))
    able = [each for each in files if each is not None and each.arch == device.arch]
    own = (device.identity, device.usual_identity)
    able.sort(key=lambda each: (own.index(each.identity) if each.identity in own else len(own), each.identity))
    return able[0].classes if able else {}


def _read_or_warn(path: Path) -> SeedLists | None:
    try:
        return read_lists(path)
    except FlashgenError as error:
        warnings.warn(printable(f"seed lists are not used: {error}", lines=True), stacklevel=4)
        return None


def read_lists(path: Path) -> SeedLists:
    """The lists of a file that serve.

    Raises:
        TuningError: it is none, or of another version.
        ConfigError: a config breaks a rule of its family.
    """
    content = read_object(path, VERSION, "seed lists")
    try:
        device, classes = content["device"], content["classes"]
        found = {
            str(name): tuple(read_config(each) for each in one["configs"])
            for name, one in classes.items()
            if one["serves"] == GENERATED
        }
        return SeedLists(identity=str(device["identity"]), arch=str(device["arch"]), classes=found)
    except (KeyError, TypeError, AttributeError) as error:
        raise TuningError(f"a file of seed lists has a device and classes; {path}: {shown(str(error))}") from error


def read_object(path: Path, version: int, what: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        TuningError: it has none, or one of another version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TuningError(f"a file of {what} is JSON that can be read; {path}: {error}") from error
    if not isinstance(content, dict) or content.get("version") != version:
        got = content.get("version") if isinstance(content, dict) else content
        raise TuningError(f"a file of {what} is an object of version {version}, got {shown(got)} in {path}")
    return content


def read_config(value: object) -> Config:
    """A config as files of lists have it.

    Raises:
        ConfigError: it breaks a rule of its family.
        TuningError: it is no object with a family and knobs.
    """
    if not isinstance(value, dict) or value.keys() != {"family", "knobs"}:
        raise TuningError(f"a config in a list has a family and knobs, got {shown(value)}")
    return validate(Config.of(value["family"], value["knobs"]))


def config_json(config: Config) -> dict[str, object]:
    """A config for such a file."""
    return {"family": config.family, "knobs": dict(config.knobs)}
