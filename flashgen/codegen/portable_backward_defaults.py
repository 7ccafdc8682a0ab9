"""The configs of the portable backward families that serve without any record: valid, and with few spills."""

from __future__ import annotations

from flashgen.codegen.portable_backward_limits import FUSED_ID, SPLIT_ID
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def default_fused(spec: Specialization, device: Device) -> Config:
    """The default config of the fused family, in constant time."""
    return Config.of(FUSED_ID, _dkdv(spec) | {"dq_transposed": False})


def default_split(spec: Specialization, device: Device) -> Config:
    """The default config of the split family, in constant time."""
    dq = {"dq_block_m": 64, "dq_block_n": 64, "dq_num_warps": 4, "dq_num_stages": 2}
    return Config.of(SPLIT_ID, _dkdv(spec) | dq)


def _dkdv(spec: Specialization) -> dict[str, KnobValue]:
    return {
        "block_m": 64,
        "block_n": 64,
        "num_warps": 4,
        "num_stages": 2,
        "loads": "pointer",
        "heads_per_group": 8 if spec.causal else 1,
        "split_d": False,
    }
