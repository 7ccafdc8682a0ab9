"""The helper kernels that a model usually needs beside its attention, to be compiled ahead of its calls."""

from __future__ import annotations

from flashgen.codegen.append_kv import PLACES, AppendSpec, append_kernel
from flashgen.codegen.common_types import storage
from flashgen.codegen.helper import HelperKernel
from flashgen.codegen.merge_states import MergeSpec, merge_kernel
from flashgen.core.workload import Specialization

ROTARY_STEP = 16
"""What rotary_dim is a multiple of."""


def usual_helpers(spec: Specialization) -> tuple[HelperKernel, ...]:
    """What `append_kv` and `merge_states` launch for tensors of these types and head dimensions.

    Of aligned tensors: every place of a token, without a rotary embedding and, where lengths say positions, with both
    kinds over whole heads and tables in the type of keys; states in one tensor, and two of them.
    """
    if spec.direction == "backward":
        return ()
    dtype = storage(spec)

    def appending(place: str, rotary: str = "") -> HelperKernel:
        whole = spec.head_dim // ROTARY_STEP * ROTARY_STEP
        return append_kernel(
            AppendSpec(
                dtype=dtype,
                head_dim=spec.head_dim,
                head_dim_v=spec.head_dim_v,
                place=place,
                rotary=rotary,
                rotary_dim=whole if rotary else 0,
                table_dtype=dtype if rotary else "",
            )
        )

    found = [appending(place) for place in PLACES]
    if spec.head_dim >= ROTARY_STEP:
        found += [appending(place, rotary) for place in ("rows", "pages") for rotary in ("halves", "interleaved")]
    return (*found, _merging(spec, separate=0), _merging(spec, separate=2))


def prefix_merge(spec: Specialization) -> HelperKernel:
    """What merges the pass of a decode call over shared keys with the one over its own."""
    return _merging(spec, separate=2)


def _merging(spec: Specialization, separate: int) -> HelperKernel:
    dtype = storage(spec)
    return merge_kernel(MergeSpec(dtype=dtype, out_dtype=dtype, head_dim=spec.head_dim_v, separate=separate))
