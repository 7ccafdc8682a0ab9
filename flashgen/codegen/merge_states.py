"""The kernel that merges partial results of attention over disjoint sets of keys."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.common_types import TL_DTYPES
from flashgen.codegen.family import Parameter
from flashgen.codegen.head_parts import power_of_two
from flashgen.codegen.helper import HelperKernel, integers, rows_of_tile
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.workload import DTYPE_BYTES

ID = "merge_states"
MOST_SEPARATE = 4
"""Tensors that a kernel takes one by one; more of them are stacked first."""

NUM_WARPS = 1
"""With more of them, weights of rows would go from where they are loaded to where states are through shared memory."""

TILE_BYTES = {"separate": 1024, "stacked": 512}
"""Of a tile of one state: 16 for each thread, or twice that where all loads are begun at once."""

STATES_IN_FLIGHT = 4
"""Of one tensor of states; one without alignment, where each element has an address of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """What is compiled in.

    Attributes:
        dtype: of the states: bf16, fp16 or fp32.
        out_dtype: of the result, likewise.
        head_dim: of both.
        separate: states that come as tensors of their own, up to `MOST_SEPARATE`; 0 is one tensor of any number.
        aligned16: whether all pointers and strides of states and result are multiples of 16 bytes.
    """

    dtype: str
    out_dtype: str
    head_dim: int
    separate: int = 0
    aligned16: bool = True

    @property
    def key(self) -> str:
        """The same in words, such as `bf16-d128-stacked`."""
        result = f"-to-{self.out_dtype}" if self.out_dtype != self.dtype else ""
        states = f"{self.separate}-states" if self.separate else "stacked"
        return f"{self.dtype}{result}-d{self.head_dim}-{states}" + ("" if self.aligned16 else "-unaligned")


def merge_kernel(spec: MergeSpec) -> HelperKernel:
    """The kernel of a specification."""
    columns = power_of_two(spec.head_dim)
    values = {
        "spec": spec,
        "block_d": columns,
        "suffixes": _suffixes(spec),
        "unroll": STATES_IN_FLIGHT if spec.aligned16 else 1,
        "steps": _steps(spec),
        "tl_dtype": TL_DTYPES[spec.out_dtype],
    }
    return HelperKernel(
        id=ID,
        key=spec.key,
        parameters=_parameters(spec),
        rows=rows_of_tile(columns, TILE_BYTES["separate" if spec.separate else "stacked"] // DTYPE_BYTES[spec.dtype]),
        num_warps=NUM_WARPS,
        values=tuple(values.items()),
    )


def _suffixes(spec: MergeSpec) -> list[str]:
    return [str(number) for number in range(spec.separate)] or [""]


def _parameters(spec: MergeSpec) -> tuple[Parameter, ...]:
    """Pointers, and numbers that follow from shapes and strides."""
    suffixes = _suffixes(spec)
    pointers = [Parameter(name=f"States{each}", type=f"*{spec.dtype}", aligned16=spec.aligned16) for each in suffixes]
    pointers += [Parameter(name=f"Lses{each}", type="*fp32") for each in suffixes]
    pointers += [Parameter(name="O", type=f"*{spec.out_dtype}", aligned16=spec.aligned16)]
    pointers += [Parameter(name="LSE", type="*fp32")]
    sizes = "num_rows inner_size middle_size" + ("" if spec.separate else " num_states")
    return (*pointers, *integers(sizes, "i32"), *integers(" ".join(_strides(spec)), "i64"))


def _strides(spec: MergeSpec) -> list[str]:
    """Along the outer, the middle and the inner axis of rows, and from state to state of one tensor."""
    tensors = [f"{tensor}{each}" for tensor in ("state", "lses") for each in _suffixes(spec)]
    names = [f"stride_{tensor}_{axis}" for tensor in (*tensors, "o", "lse") for axis in ("outer", "middle", "inner")]
    return names + ([] if spec.separate else ["stride_state_next", "stride_lses_next"])


def _steps(spec: MergeSpec) -> list[tuple[str, int]]:
    """Each stride of a tensor that is loaded and stored 16 bytes at a time, and what it is a multiple of."""
    of_result = ALIGNMENT_BYTES // DTYPE_BYTES[spec.out_dtype]
    of_states = ALIGNMENT_BYTES // DTYPE_BYTES[spec.dtype]
    wide = [(name, of_result if name.startswith("stride_o_") else of_states) for name in _strides(spec)]
    return [(name, step) for name, step in wide if spec.aligned16 and not name.startswith("stride_lse")]
