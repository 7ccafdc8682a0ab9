"""The launch vocabulary: every parameter that a kernel may have, by name, and what a launch binds it to.

A kernel family names parameters, and a launch writes them, whatever the family. A parameter that no row of this table
describes is refused when a plan is made. Sizes and strides are in elements; the axes b, h, s are batch, head, sequence.

| parameter | type | a launch binds it to |
|---|---|---|
| `Q`, `K`, `V`, `O` | pointer | the tensors of the call, (batch, heads, sequence, head_dim) |
| `DO` | pointer | backward: the gradient of the output |
| `DQ`, `DK`, `DV` | pointer | backward: the gradients that kernels write |
| `LSE` | `*fp32` | log-sum-exp, (batch, nheads, seqlen_q), contiguous; forward: null where not wanted |
| `lse_rows` | i32 | forward: seqlen_q, or 0 where the call wants no LSE |
| `DLSE` | `*fp32` | backward: the gradient of the LSE, contiguous; null where there is none |
| `dlse_rows` | i32 | backward: seqlen_q, or 0 where there is no gradient of the LSE |
| `DBias` | pointer | backward: the gradient of the bias, contiguous; null where there is none |
| `stride_dbias_b`, `stride_dbias_h`, `stride_dbias_q` | i32, i64 | backward: its strides, 0 along axes of size 1 |
| `bias_batch`, `bias_heads` | i32 | backward: sizes of its first two axes |
| `<t>_desc` | tensordesc | a descriptor of `q`, `k`, `v`, `o`, `do`, `dq`, `dk` or `dv`: of four dimensions, or of \
rank 5 with the heads that share keys in an axis of their own, or of packed sequences as TMA clips behind any row |
| `<t>1_desc` | tensordesc | another descriptor of the same tensor, for the second part of a head |
| `bias_desc`, `mask_desc` | tensordesc | a descriptor beside the pointer `Bias` or `Mask` |
| `stride_<t>b`, `stride_<t>h`, `stride_<t>s` | i32, i64 | strides of `q`, `k`, `v`, `o`, `do`, `dq`, `dk`, `dv` |
| `batch`, `nheads`, `seqlen_q`, `seqlen_k` | i32 | sizes of the call |
| `group_size` | i32 | query heads of a KV head |
| `key_splits` | i32 | CTAs that share the keys of a tile of queries: 1 where the config has none do so |
| `softmax_scale` | fp32 | the factor of the scores |
| `softmax_scale_log2` | fp32 | the same times log2(e) |
| `q_offset` | i32 | the position of the first query among the keys, clamped to what makes a difference |
| `QOffset` | `*i32` | the same as a tensor (batch,), where the specialization has one |
| `window_left`, `window_right` | i32 | keys visible to each side of a query |
| `softcap_rate`, `softcap_scale_log2` | fp32 | factors of `softcap * tanh(score / softcap)` in powers of 2 |
| `AlibiSlopes` | `*fp32` | (nheads,) or (batch, nheads) |
| `stride_alibi_b` | i32 | its stride along the batch, or 0 |
| `Sinks` | pointer | (nheads,) |
| `Bias`, `Mask` | pointer, `*u8` | what is added to the scores, and which scores are seen |
| `stride_bias_<x>`, `stride_mask_<x>` | i32, i64 | their strides along b, h, q and k, 0 where they broadcast |
| `PartialCounts`, `PartialIndices`, `FullCounts`, `FullIndices` | `*i32` | the lists of a block mask |
| `QPartialCounts`, `QPartialIndices`, `QFullCounts`, `QFullIndices` | `*i32` | the same of query blocks |
| `num_q_blocks`, `num_k_blocks` | i32 | its blocks |
| `stride_block_b`, `stride_block_h` | i32 | steps between its query blocks of batches and heads, 0 where shared |
| `CuSeqlensQ`, `CuSeqlensK` | `*i32` | first rows of packed sequences, and the end of the last one |
| `SeqUsedQ`, `SeqUsedK` | `*i32` | how many rows of each are used |
| `has_seqused_q`, `has_seqused_k` | i32 | 1 where the call says so, or 0 |
| `sequences` | i32 | how many packed sequences there are |
| `Table` | `*i32` | pages of each sequence, (sequences, pages of one) |
| `num_pages` | i32 | pages of K and V, whose batch axis they are |
| `table_keys` | i32 | keys of a sequence that a row of the table has pages for |
| `stride_table` | i64 | its stride along the sequences |
| `total_q`, `total_k` | i32 | rows of all of them: seqlen_q and seqlen_k of their one batch element |
| `RngState` | `*i64` | seed and offset of the bits that drop weights |
| `dropout_threshold` | i32 | drops a weight whose bits lie below it, in the upper half of a word without a sign |
| `dropout_scale` | fp32 | what weights that are left are multiplied by |
| `Aux<n>` | pointer | tensor n of the user's score functions |
| `DAux<n>` | `*fp32` | where gradients of the n-th of these that has one are added, 0 at first |
| `Counter` | `*i32` | one integer that is 0 before the first launch, the kernel's own on each stream and capture; the \
kernel leaves it at 0 |
| `<Piece>` | pointer | a piece of the family's scratch memory: `DqAcc` is `dq_acc` |
| `<piece>_desc` | tensordesc | a descriptor of that piece; of a lower rank, its first axis holds all before it |
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.launch import feature_arguments

STRIDED = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
"""Tensors of four dimensions that kernels find by strides or descriptors; the others are contiguous."""

COUNTER = "Counter"
"""The one parameter whose value is not the same in all kernels of a call."""

OFFSET_TENSOR = "QOffset"
KEY_SPLITS = "key_splits"

CALL_SCALARS = ("softmax_scale", "softmax_scale_log2", "q_offset", *feature_arguments.CALL_NUMBERS)
"""Numbers that may differ between the calls of one geometry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor of a call.

    Attributes:
        name: its id in the vocabulary; its strides are `stride_<name>b` and so on, its descriptor `<name>_desc`.
        pointer: the parameter that points to it.
        rows: the parameter that is seqlen_q where the call has the tensor and 0 where it has none; "" for none.
    """

    name: str
    pointer: str
    rows: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """What the launches of one direction have beside what all have: their tensors, in the order of their addresses."""

    tensors: tuple[NamedTensor, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """Parameters that say whether an optional tensor is there."""
        return tuple(tensor.rows for tensor in self.tensors if tensor.rows)


def _strided(*names: str) -> tuple[NamedTensor, ...]:
    return tuple(NamedTensor(name=name, pointer=name.upper()) for name in names)


DIRECTIONS = {
    "forward": Direction(
        tensors=(*_strided("q", "k", "v", "o"), NamedTensor(name="lse", pointer="LSE", rows="lse_rows"))
    ),
    "backward": Direction(
        tensors=(
            *_strided(*STRIDED),
            NamedTensor(name="lse", pointer="LSE"),
            NamedTensor(name="dlse", pointer="DLSE", rows="dlse_rows"),
            NamedTensor(name="dbias", pointer="DBias"),
        )
    ),
}
"""By `Specialization.direction`."""
