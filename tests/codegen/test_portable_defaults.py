"""What serves float32, and gradients beside a bias or a mask, without a record, against the trials of an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.left_out import SEARCHES
from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.core.record import Measurement
from flashgen.core.workload import Specialization
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.measure.protocol import specialization

H200 = find_device("h200")
FOLDER = SEARCHES / H200.folder
FP32 = sorted((*FOLDER.glob(f"fwd-fp32-*{SUFFIX}"), *FOLDER.glob(f"fwd-tf32-*{SUFFIX}")))
BESIDE = [path for name in ("bias", "keybias", "mask") for path in FOLDER.glob(f"bwd-*-d128-{name}-*{SUFFIX}")]


@pytest.mark.parametrize("path", FP32 + BESIDE, ids=lambda path: path.name.removesuffix(SUFFIX))
def test_the_default_is_near_the_best_trial(path: Path) -> None:
    """Those that spill nothing took 1.27 to 1.47 times as long as the best, and 1.06 to 1.40 beside a bias."""
    log = read_log(path)
    times = {each.config: each.outcome.median_ms for each in log.trials if isinstance(each.outcome, Measurement)}
    default = default_config(specialization(log.search.workload), H200)
    assert times[default] <= 1.18 * min(times.values())


def test_there_are_searches_of_all() -> None:
    assert len(FP32) >= 7
    assert len(BESIDE) >= 3


@pytest.mark.parametrize("key", ["fwd-fp32-d64-causal-varlen", "fwd-tf32-d128-bias", "fwd-fp32-d128-window"])
def test_features_keep_tiles_that_spill_less(key: str) -> None:
    spec = Specialization.parse(key)
    assert default_config(spec, H200)["block_n"] < 64


@pytest.mark.parametrize("key", ["bwd-bf16-d128-bias-dbias-window", "bwd-bf16-d128-bias-softcap"])
def test_more_features_beside_a_bias_keep_short_steps(key: str) -> None:
    assert default_config(Specialization.parse(key), H200)["block_m"] == 32
