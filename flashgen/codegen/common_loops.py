"""The kernels of all families as the analytic model sees them: loops over tiles of scores, and streams of bytes.

A forward pass is one loop, which owns queries and walks keys. Of a backward pass:

| kernel | a program owns, walks | products of a step | columns of all of them |
|---|---|---|---|
| dK and dV | keys, queries of every head that shares them | S, dP, dV, dK | 2 d + 2 dv |
| dQ | queries, keys | S, dP, dQ | 2 d + dv |
| all in one | keys, queries | S, dP, dV, dK, dQ | 3 d + 2 dv |

Computing S and dP twice is what makes seven products of five. All in one step also adds a tile of dQ in fp32 to device
memory, which reads and writes it in the L2. The first kernel reads O and dO, and writes zeros where sums follow; the
last one reads these sums and writes dQ. The gradient of a bias for every query and key is left out: its kernel has no
knobs, so it costs all configs of a family alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashgen.codegen import head_packing
from flashgen.codegen.common_groups import parts_of
from flashgen.codegen.common_steps import key_steps, steps
from flashgen.codegen.cost import Loop, Steps, Tiling
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.workload import DTYPE_BYTES, Workload

FORWARD_SCORE_OPERATIONS = 5
"""Of each score: scale, maximum, subtract, sum and pack."""

FORWARD_PROLOGUE = 3000
"""Cycles of a program outside of its loop: launch, the query tile's load, the division and the store."""

SCORE_OPERATIONS = 5
"""Of each score of a backward pass: scale and subtract in one, add and multiply for dS, pack P and dS."""

PROLOGUE = 5000
"""Cycles of a program outside of its loop: launch, loads of two tiles, stores of two others."""

FP32_BYTES = 4
STATISTICS_BYTES = 2 * FP32_BYTES
"""Of each query row: its LSE, and the sum over dO and O."""


def forward_loop(w: Workload, tile: Tiling) -> Loop:
    """The kernel of a forward pass."""
    columns = tile.query_columns + tile.value_columns
    return Loop(
        rows=tile.block_m,
        columns=tile.block_n,
        steps=steps(w, tile.block_m // tile.packed_heads, tile.block_n),
        heads=head_packing.packs(Sizes.of(w), tile.packed_heads),
        repeats=1,
        head_columns=columns,
        walked_columns=columns,
        owned_columns=tile.query_columns,
        reads=1,
        score_operations=FORWARD_SCORE_OPERATIONS,
        row_operations=w.head_dim_v,  # every step rescales the output
        prologue=FORWARD_PROLOGUE,
        tensor_bytes=w.bytes,
        walked_bytes=_key_bytes(w),
        warps=tile.warps,
        stages=tile.stages,
        pointer_loads=tile.pointer_loads,
        heads_per_group=tile.heads_per_group,
        heavy_first=tile.heavy_first,
        steps_in_flight=tile.steps_in_flight,
        precision=tile.precision,
        hardware_tanh=tile.hardware_tanh,
    )


def of_shares(loop: Loop, w: Workload, splits: int) -> Loop:
    """A forward pass whose programs have a share of the keys each, the last of them what is masked.

    Their outputs in fp32 are written, and read by another kernel.
    """
    if splits == 1:
        return loop
    moved = 2 * splits * _query_rows(w) * w.head_dim_v * FP32_BYTES
    return replace(
        loop, steps=_in_shares(loop.steps, splits, masked=splits - 1), tensor_bytes=loop.tensor_bytes + moved
    )


def _in_shares(steps: Steps, shares: int, *, masked: int) -> Steps:
    """The steps of so many programs for each block, of which the one of this number has the masked ones."""
    if shares == 1:
        return steps
    full = [f * (n + 1) // shares - f * n // shares for f in steps.full for n in range(shares)]
    hidden = [m if n == masked else 0 for m in steps.masked for n in range(shares)]
    return Steps(full=tuple(full), masked=tuple(hidden))


def owning_keys(w: Workload, tile: Tiling, added_trips: int = 0) -> Loop:
    """The kernel of dK and dV, and of dQ where `added_trips` (of `Loop`) says that it goes to memory, too."""
    d, dv, size = tile.query_columns, tile.value_columns, DTYPE_BYTES[w.dtype]
    added = d if added_trips else 0
    adds = added_trips > 0 and not tile.writes_dq
    dq_bytes = 2 * sums_bytes(w) if adds else tile.writes_dq * _query_rows(w) * w.head_dim * size
    group = w.nheads // w.nheads_k
    parts, shares = parts_of(group, tile.walked_heads), tile.query_shares
    # sums of parts are written, and read by another kernel
    sums = shares * parts if tile.walked_heads or shares > 1 else 0
    parts_bytes = 2 * w.batch * w.nheads_k * sums * w.seqlen_k * (d + dv) * FP32_BYTES
    walked = _query_rows(w) * ((w.head_dim + w.head_dim_v) * size + STATISTICS_BYTES)
    return Loop(
        rows=tile.block_n,
        columns=tile.block_m,
        steps=_in_shares(key_steps(w, tile.block_m, tile.block_n), shares, masked=0),
        heads=w.batch * w.nheads_k * parts,
        repeats=-(-group // parts),
        head_columns=2 * d + 2 * dv + added,
        walked_columns=d + dv,
        owned_columns=d + dv + added,
        reads=2,
        products_in_flight=True,
        score_operations=SCORE_OPERATIONS,
        row_operations=0,
        prologue=PROLOGUE,
        tensor_bytes=walked + 2 * _key_bytes(w) + dq_bytes + parts_bytes,
        walked_bytes=walked,
        added_bytes=tile.block_m * added * (FP32_BYTES if adds else size // 2),  # what is only written is half of it
        added_trips=added_trips,
        through_smem=added_trips > 0,
        warps=tile.warps,
        stages=tile.stages,
        pointer_loads=tile.pointer_loads,
        heads_per_group=tile.heads_per_group,
        heavy_first=tile.heavy_first,
        steps_in_flight=tile.steps_in_flight,
        precision=tile.precision,
    )


def owning_queries(w: Workload, tile: Tiling) -> Loop:
    """The kernel of dQ, which is shaped as a forward pass."""
    d, dv, size = tile.query_columns, tile.value_columns, DTYPE_BYTES[w.dtype]
    return Loop(
        rows=tile.block_m,
        columns=tile.block_n,
        steps=steps(w, tile.block_m, tile.block_n),
        heads=w.batch * w.nheads,
        repeats=1,
        head_columns=2 * d + dv,
        walked_columns=d + dv,
        owned_columns=d + dv,
        reads=1.5,  # K twice, V once
        products_in_flight=True,
        score_operations=SCORE_OPERATIONS - 1,  # P itself is not packed
        row_operations=0,
        prologue=PROLOGUE,
        tensor_bytes=_key_bytes(w) + _query_rows(w) * ((2 * w.head_dim + w.head_dim_v) * size + STATISTICS_BYTES),
        walked_bytes=_key_bytes(w),
        warps=tile.warps,
        stages=tile.stages,
        pointer_loads=tile.pointer_loads,
        heads_per_group=tile.heads_per_group,
        heavy_first=tile.heavy_first,
        steps_in_flight=tile.steps_in_flight,
        precision=tile.precision,
    )


def streamed_bytes(w: Workload, config: Config, *, adds_dq: Callable[[Config], bool]) -> tuple[int, ...]:
    """Bytes that each of the other kernels moves through device memory; `adds_dq` says of a config that dQ is sums."""
    size = DTYPE_BYTES[w.dtype]
    prepare = _query_rows(w) * (2 * w.head_dim_v * size + STATISTICS_BYTES)
    if not adds_dq(config):
        return (prepare,)
    return prepare + sums_bytes(w), sums_bytes(w) + _query_rows(w) * w.head_dim * size


def sums_bytes(w: Workload) -> int:
    """Of dQ in fp32."""
    return _query_rows(w) * w.head_dim * FP32_BYTES


def _query_rows(w: Workload) -> int:
    return w.batch * w.nheads * w.seqlen_q


def _key_bytes(w: Workload) -> int:
    """Of K and V, and likewise of their gradients."""
    return w.batch * w.nheads_k * w.seqlen_k * (w.head_dim + w.head_dim_v) * DTYPE_BYTES[w.dtype]
