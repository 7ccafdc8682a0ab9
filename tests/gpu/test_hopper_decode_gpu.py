"""The Hopper decode family on a GPU: the attacks of decode calls under configs of its own, whatever serves by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.codegen.common_decode import ONLY_SHARES
from flashgen.codegen.families import family, invalid, unsupported
from flashgen.core.config import KnobValue
from flashgen.launch.gpu import current_device
from flashgen.runtime.decode import runs
from flashgen.runtime.decode.call import CheckedDecode
from tests.decoding import assert_right, make
from tests.gpu.decode_cases import CASES

pytestmark = pytest.mark.gpu

MERGE: dict[str, KnobValue] = {"merge_rows": 4, "reduce_warps": 4, "partials": 8}
CONFIGS: dict[str, dict[str, KnobValue]] = {
    "default": {},
    "two programs": {"block_n": 64, "num_stages": 3, "per_sm": 2, "slack": 16, "slack_percent": 8},
    "splits": {"schedule": "grid", **ONLY_SHARES},
    "splits, two programs, chunks": {
        "schedule": "grid",
        **ONLY_SHARES,
        "block_n": 64,
        "num_stages": 3,
        "per_sm": 2,
        "chunk": 1024,
        "early": True,
    },
    "wide steps": {"block_n": 128, "num_stages": 2, "min_tiles": 4},
    "narrow steps": {"block_n": 32, "num_stages": 6, "pdl": False},
    "rows merged together": {**MERGE, "merge_rows": 8, "block_n": 64, "slack": 0},
    "splits, rows merged together": {**MERGE, "schedule": "grid", **ONLY_SHARES, "chunk": 1024},
    "rows of 8": {"block_m": 8, "block_n": 64, "num_stages": 3, "slack": 0, **MERGE},
    "rows of 16, wide steps": {"block_m": 16, "block_n": 128, "num_stages": 2},
    "rows of 16, three programs": {"block_m": 16, "block_n": 64, "num_stages": 2, "per_sm": 3},
    "rows of 8, splits": {"block_m": 8, "schedule": "grid", **ONLY_SHARES, "block_n": 64, "num_stages": 3},
}


@pytest.mark.parametrize("split", [None, 256], ids=["any", "fixed"])
@pytest.mark.parametrize("knobs", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_and_reads_nothing_that_is_hidden(name: str, knobs: str, split: int | None) -> None:
    call = replace(make(CASES[name], "cuda"), fixed_split_size=split, return_lse=True)
    checked, device = CheckedDecode.of(call, torch.empty_like(call.q)), current_device(0)
    row = family("hopper_decode")
    reason = unsupported(row, checked.spec, device)
    if reason is not None:
        pytest.skip(reason)
    config = row.default(checked.spec, device).replace(**CONFIGS[knobs])
    config = row.fitted(checked.spec, config, checked.shape.sizes, device)
    if (reason := invalid(config, checked.spec, device)) is not None:
        pytest.skip(reason)
    out, lse = runs.run(call, config)
    assert lse is not None
    assert_right(call, out, lse)
    again, lse_again = runs.run(call, config)
    assert lse_again is not None
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
