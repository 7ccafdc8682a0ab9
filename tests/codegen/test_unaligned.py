"""Kernels of tensors that are not aligned to 16 bytes on Hopper: loads of 2 bytes go through registers."""

from __future__ import annotations

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.tiers import only

H200 = find_device("h200")
KEYS = [
    f"{way}-bf16-d{dim}{mask}-unaligned" for way in ("fwd", "bwd") for dim in (64, 128, 256) for mask in ("", "-causal")
]


@pytest.mark.parametrize("key", only(KEYS, "fwd-bf16-d64-unaligned", "bwd-bf16-d128-causal-unaligned"))
def test_defaults_have_registers_for_their_loads(key: str) -> None:
    """Tiles of aligned tensors spill up to 2224 bytes of a thread here."""
    spec = Specialization.parse(key)
    assert compile_kernel(spec, default_config(spec, H200), H200).spills <= 128
