"""The kernel that writes new keys and values into a cache, and rotates them and the queries on the way."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.common_types import TL_DTYPES
from flashgen.codegen.family import Parameter
from flashgen.codegen.head_parts import power_of_two
from flashgen.codegen.helper import HelperKernel, integers, rows_of_tile
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.workload import DTYPE_BYTES

ID = "append_kv"
PLACES = ("rows", "pages", "slots")
"""Where a token goes: the row of its sequence, through the table of its pages, or a slot of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendSpec:
    """What is compiled in.

    Attributes:
        dtype: of keys, values, cache and queries: bf16, fp16 or fp32.
        head_dim: of keys and queries.
        head_dim_v: of values.
        place: one of `PLACES`.
        rotary: how columns are paired: not at all (empty), `halves`, which pairs i with i + rotary_dim / 2 (GPT-NeoX),
            or `interleaved`, which pairs 2i with 2i + 1 (GPT-J).
        rotary_dim: columns that are rotated, a multiple of 16; 0 without.
        table_dtype: of cos and sin; empty without.
        aligned16: whether all pointers and strides of tensors with columns are multiples of 16 bytes.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    place: str
    rotary: str = ""
    rotary_dim: int = 0
    table_dtype: str = ""
    aligned16: bool = True

    @property
    def key(self) -> str:
        """The same in words, such as `bf16-d128-pages-halves128-bf16`."""
        dims = f"d{self.head_dim}" + (f"-dv{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        rotary = f"-{self.rotary}{self.rotary_dim}-{self.table_dtype}" if self.rotary else ""
        return f"{self.dtype}-{dims}-{self.place}{rotary}" + ("" if self.aligned16 else "-unaligned")


NUM_WARPS = 1
TILE_ELEMENTS = 512
"""Of a tile of keys: 16 for each thread, so two loads of 16 bytes."""

ROTARY_POINTERS = ("Q", "QOut", "Cos", "Sin")
PLACE_POINTERS = {"rows": ("*i32", "BatchIdx"), "pages": ("*i32", "BlockTable"), "slots": ("*i64", "SlotMapping")}

OF_THE_CALL = ("seqlen", "num_seqlens", "num_batch_idx", "num_rotary_seqlens")
"""Numbers that may differ between calls of equal shapes; the others follow from shapes and strides."""


def append_kernel(spec: AppendSpec) -> HelperKernel:
    """The kernel of a specification."""
    half = spec.rotary_dim // 2
    columns = power_of_two(spec.head_dim), power_of_two(spec.head_dim_v)
    values = {
        "spec": spec,
        "block_d": columns[0],
        "block_dv": columns[1],
        "half": half,
        "block_half": power_of_two(half),
        "block_rest": power_of_two(spec.head_dim - spec.rotary_dim),
        "steps": _steps(spec),
        "tl_dtype": TL_DTYPES[spec.dtype],
    }
    return HelperKernel(
        id=ID,
        key=spec.key,
        parameters=_parameters(spec),
        rows=rows_of_tile(max(columns), TILE_ELEMENTS),
        num_warps=NUM_WARPS,
        values=tuple(values.items()),
    )


def _parameters(spec: AppendSpec) -> tuple[Parameter, ...]:
    """Pointers, the numbers of `OF_THE_CALL`, and those that follow from shapes and strides."""
    table = {"Cos": spec.table_dtype, "Sin": spec.table_dtype}
    names = ("K", "V", "KCache", "VCache") + (ROTARY_POINTERS if spec.rotary else ())
    moved = [Parameter(name=name, type=f"*{table.get(name, spec.dtype)}", aligned16=spec.aligned16) for name in names]
    kind, place = PLACE_POINTERS[spec.place]
    lengths = [Parameter(name=name, type="*i32") for name in ("Seqlens", "RotarySeqlens")]
    sizes = "kv_rows seqlen_new nheads_k page_size num_pages num_blocks"
    if spec.rotary:
        sizes += " q_rows seqlen_q nheads table_rows q_moves"
    strides = _strides(spec)
    return (
        *moved,
        *lengths,
        Parameter(name=place, type=kind),
        *integers(" ".join(OF_THE_CALL), "i32"),
        *integers(sizes, "i32"),
        *integers(" ".join(strides), "i64"),
        *integers("stride_table" if spec.place == "pages" else "", "i64"),
    )


def _strides(spec: AppendSpec) -> list[str]:
    names = [f"stride_{tensor}{axis}" for tensor in ("k", "v") for axis in "bsh"]
    names += [f"stride_{tensor}{axis}" for tensor in ("kc", "vc") for axis in "bsh"]
    if spec.rotary:
        names += [f"stride_{tensor}{axis}" for tensor in ("q", "qo") for axis in "bsh"]
        names += ["stride_cos", "stride_sin"]
    return names


def _steps(spec: AppendSpec) -> list[tuple[str, int]]:
    """Each stride of a tensor with columns, and what it is a multiple of where 16 bytes are moved at a time."""
    dtypes = {"stride_cos": spec.table_dtype, "stride_sin": spec.table_dtype}
    steps = [(name, ALIGNMENT_BYTES // DTYPE_BYTES[dtypes.get(name, spec.dtype)]) for name in _strides(spec)]
    return steps if spec.aligned16 else []
