"""The numbers that a learned cost model is told of a candidate: of its workload, its device, its knobs and its tiles.

Families have different knobs. Each knob has columns of its own, by its name, which families share: what `num_stages`
does is much the same in all of them. A number is one column, as a logarithm; a word or a flag has one for each value. A
knob that a family lacks is `ABSENT`. What the analytic model expects is a column, too, where a family has such a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.lengths import page_class
from flashgen.core.nearest import visible_keys
from flashgen.core.workload import Workload
from flashgen.tuning.predict import cost_model, predict_all

ABSENT = -2.0
"""A knob that the family lacks, below every value of those that have it."""

UNPREDICTED = 99.0
"""In the column of the analytic model, of a family that it does not cover: above all that it expects."""

WARPGROUP_ROWS = 64
"""Query rows of a consumer warpgroup, where tiles are counted in those."""

FLAGS = ("causal", "softcap", "alibi", "sink", "varlen", "deterministic", "is_decode")

Row = list[float]


def rows_of(workload: Workload, device: Device, configs: Sequence[Config]) -> list[Row]:
    """One row for each config, all of the same length, whatever the family."""
    shared = [*_workload_columns(workload), *_device_columns(device)]
    expected = _expected(workload, device, configs)
    return [
        [*shared, *_knob_columns(config), *_tile_columns(config, workload, device), expected[config]]
        for config in configs
    ]


def _workload_columns(w: Workload) -> Row:
    has_window = w.window_left is not None or w.window_right is not None
    seen = visible_keys(w.seqlen_k, w.window_left, 0 if w.causal else w.window_right, has_window=has_window)
    sizes = (w.batch, w.nheads, w.nheads // w.nheads_k, w.seqlen_q, w.seqlen_k, seen, w.batch * w.nheads * w.seqlen_q)
    kinds = (w.direction == "backward", w.dtype == "fp16", w.dtype in ("fp32", "tf32"), has_window, bool(w.bias))
    return [
        *map(_log, sizes),
        float(w.head_dim),
        float(w.head_dim_v),
        _log(page_class(w.page_size)),
        _log((w.total_q or 0) / w.batch if w.varlen else 0),
        *(float(kind) for kind in (*kinds, bool(w.mask))),
        *(float(bool(getattr(w, name))) for name in FLAGS),
    ]


def _device_columns(device: Device) -> Row:
    numbers = (device.num_sms, device.smem_per_sm, device.l2_bytes, device.bandwidth_gbs, device.peak_tflops)
    return [float(device.is_nvidia), float(device.has_wgmma), *map(_log, numbers)]


def _knob_columns(config: Config) -> Row:
    given: Mapping[str, KnobValue] = dict(config.knobs)
    found = []
    for name, value in _columns():
        if name not in given:
            found.append(ABSENT)
        else:
            found.append(_log(int(given[name])) if value is None else float(given[name] == value))
    return [*found, *(float(config.family == family) for family in _families())]


@functools.lru_cache(maxsize=1)
def _columns() -> tuple[tuple[str, KnobValue | None], ...]:
    """The columns of knobs: a name and, of words and flags, the value that a column stands for."""
    known: dict[str, dict[KnobValue, None]] = {}
    for row in (*FAMILIES, *DECODE_FAMILIES):
        for knob in row.knobs:
            known.setdefault(knob.name, {}).update(dict.fromkeys(knob.values))
    columns: list[tuple[str, KnobValue | None]] = []
    for name, values in known.items():
        are_numbers = all(type(value) is int for value in values)
        columns += [(name, None)] if are_numbers else [(name, value) for value in values]
    return tuple(columns)


@functools.lru_cache(maxsize=1)
def _families() -> tuple[str, ...]:
    return tuple(row.id for row in (*FAMILIES, *DECODE_FAMILIES))


def _tile_columns(config: Config, w: Workload, device: Device) -> Row:
    """Rows and scores of a tile, waves of tiles over the SMs, and how full the last wave is."""
    rows = int(config.get("block_m", 0) or WARPGROUP_ROWS * int(config.get("warpgroups", 1)))
    tiles = w.batch * w.nheads * math.ceil(w.seqlen_q / rows)
    waves = tiles / (device.num_sms * max(int(config.get("blocks_per_sm", 1)), 1))
    return [_log(rows), _log(rows * int(config.get("block_n", 1))), _log(waves), waves / max(math.ceil(waves), 1)]


def _expected(workload: Workload, device: Device, configs: Sequence[Config]) -> dict[Config, float]:
    """The logarithm of what the analytic model expects for each operation, or `UNPREDICTED`."""
    covered = [config for config in configs if cost_model(config) is not None]
    times = predict_all(workload, covered, device)
    per_operation = 1e12 / max(workload.flops, 1)
    return {
        config: math.log(times[config] * per_operation) if times.get(config, 0) > 0 else UNPREDICTED
        for config in configs
    }


def _log(value: float) -> float:
    return math.log2(value) if value > 0 else -1.0
