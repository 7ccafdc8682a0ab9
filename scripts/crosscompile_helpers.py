"""Which helper kernels `scripts/crosscompile.py` compiles: under either Triton all of these, for sm80 and sm90."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.append_kv import AppendSpec, append_kernel
from flashgen.codegen.helper import HelperKernel
from flashgen.codegen.merge_states import MergeSpec, merge_kernel
from flashgen.core.device import Device, find_device

HELPERS = (
    append_kernel(
        AppendSpec(
            dtype="bf16",
            head_dim=128,
            head_dim_v=128,
            place="pages",
            rotary="halves",
            rotary_dim=128,
            table_dtype="bf16",
        )
    ),
    append_kernel(
        AppendSpec(
            dtype="fp16",
            head_dim=80,
            head_dim_v=80,
            place="slots",
            rotary="interleaved",
            rotary_dim=32,
            table_dtype="fp32",
        )
    ),
    merge_kernel(MergeSpec(dtype="bf16", out_dtype="bf16", head_dim=128)),
    merge_kernel(MergeSpec(dtype="fp32", out_dtype="bf16", head_dim=64, separate=2)),
)
HELPER_TARGETS = ("sm80", "sm90")


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperJob:
    """One helper kernel for one device; none may spill."""

    helper: HelperKernel
    device: Device


def helper_jobs() -> list[HelperJob]:
    """Helper kernels, which are small and alike everywhere."""
    return [HelperJob(helper=helper, device=find_device(target)) for target in HELPER_TARGETS for helper in HELPERS]
