"""Steps of decoding by both of its kernels, in memory that holds NaN before."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from flashgen.codegen.families import invalid
from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_decode.defaults import ONLY_SHARES
from flashgen.codegen.render import render
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.launch.decode_numbers import DecodeNumbers
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from tests.decoding import decode_config

DEVICE = replace(find_device("sm90"), num_sms=3)

GRID: dict[str, KnobValue] = {"schedule": "grid", **ONLY_SHARES}
WARPS: dict[str, KnobValue] = {"warp_keys": True, "num_warps": 2, "block_n": 32}


def interpreted(call: DecodeCall, **knobs: KnobValue) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by both kernels, in memory that holds NaN before."""
    call = replace(call, return_lse=True)
    out, lse = results(call)
    checked = CheckedDecode.of(call, out)
    launched(call, checked, small_config(checked, **knobs), out, lse)
    return out, lse


def results(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the output and the LSE of a call go: NaN before."""
    out = empty_output(call.q, call.v_cache, bshd=True).fill_(math.nan)
    return out, empty_lse(call.q, bshd=True).fill_(math.nan)


def small_config(checked: CheckedDecode, **knobs: KnobValue) -> Config:
    """A config that takes few keys at once, so that there is something to split."""
    config = decode_config(checked.spec, checked.shape.sizes, DEVICE)
    small = {"block_n": 16, "page_ids": "load", "pdl": False, "slack": 0, "warp_keys": False, "schedule": "shares"}
    config = config.replace(**{**small, **knobs})
    assert invalid(config, checked.spec, DEVICE) is None
    return config


def launched(
    call: DecodeCall,
    checked: CheckedDecode,
    config: Config,
    out: torch.Tensor,
    lse: torch.Tensor,
    **beside: torch.Tensor,
) -> None:
    """Both kernels over the tensors of a call, and what some kernels read beside them."""
    module = load_module(render(checked.spec, config))
    numbers = DecodeNumbers.of(checked.shape, config, DEVICE)
    none = torch.zeros(1, dtype=torch.int32)
    known = {"Q": call.q, "K": call.k_cache, "V": call.v_cache, "O": out, "LSE": lse, "Lens": call.seqlens}
    known |= {"Leftpad": none if call.leftpad is None else call.leftpad, "Table": call.block_table}
    known |= {"BatchIdx": none if call.batch_idx is None else call.batch_idx, "Sinks": call.features.sinks}
    known |= {"AlibiSlopes": call.features.alibi_slopes, "PartLse": torch.full((numbers.part_rows,), math.nan)}
    known |= {"PartO": torch.full((numbers.part_rows, checked.shape.head_dim_v), math.nan)}
    known |= numbers.values(config) | beside
    for name, grid in zip(("", "_reduce"), numbers.grids, strict=True):
        kernel = getattr(module, config.family + name)
        if grid:
            kernel[grid](*[known[one] for one in kernel.arg_names])
