"""The tables of memory traffic, from the rows of `io.csv`: measured bytes beside those of the models."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.io_cases import BACKWARD_SUITE, BLOCKS_SUITE, FORWARD_SUITE, SEQLENS, blocks_of
from benchmarks.markdown import by_workload, image, provenance, table_row
from benchmarks.results import Row
from benchmarks.traffic import standard_traffic_bytes, tiled_bytes
from flashgen.core.workload import DTYPE_BYTES, Workload

PASSES = {FORWARD_SUITE: "forward", BACKWARD_SUITE: "backward"}
MODEL_ERROR = 0.1
MERGED = (
    " They are fewer where programs side by side read the same keys: the L1 of an SM serves some of them, and requests "
    "of neighbouring SMs for the same lines are merged before L2 counts them (the counter does not tell these apart)."
)
"""Said where L2 was asked for less than the model by more than this share."""

TITLES = {"flashgen": "flashgen", "sdpa-flash": "SDPA flash", "standard": "standard"}


def io_parts(device_slug: str, rows: Sequence[Row], charts: Sequence[str]) -> list[str]:
    """The sections of memory traffic, or nothing if it has no rows."""
    used = [row for row in rows if row.suite in PASSES and hbm_bytes(row) is not None]
    blocks = [row for row in rows if row.suite == BLOCKS_SUITE and hbm_bytes(row) is not None]
    parts = []
    if used:
        chart = image(charts, f"io_{device_slug}", "Bytes moved against sequence length and block size")
        parts += ["### Memory traffic", _text(used), *chart, _table(used)]
    if blocks:
        parts += ["### Memory traffic and block sizes", _blocks_text(blocks), _blocks_table(blocks)]
    return parts


def hbm_bytes(row: Row) -> int | None:
    """Bytes that a call read from HBM and wrote to it."""
    if row.hbm_read_bytes is None or row.hbm_write_bytes is None:
        return None
    return row.hbm_read_bytes + row.hbm_write_bytes


def growth(rows: Sequence[Row], suite: str, impl: str, head_dim: int) -> float | None:
    """Traffic at the longest sequences over that at the shortest ones."""
    found = {
        workload.seqlen_k: moved
        for row in rows
        if row.suite == suite and row.impl == impl
        for workload in [Workload.parse(row.workload)]
        if workload.head_dim == head_dim and (moved := hbm_bytes(row))
    }
    shortest, longest = SEQLENS[0], SEQLENS[-1]
    return found[longest] / found[shortest] if shortest in found and longest in found else None


def _text(used: Sequence[Row]) -> str:
    dims = sorted({Workload.parse(row.workload).head_dim for row in used})
    said = []
    for impl in ("standard", "flashgen"):
        ratios = [ratio for suite in PASSES for d in dims if (ratio := growth(used, suite, impl, d)) is not None]
        if ratios:
            said.append(f"{_span(ratios)} times for {TITLES[impl]}")
    grown = f" From {SEQLENS[0]} to {SEQLENS[-1]} tokens a sequence it grows {' and '.join(said)}." if said else ""
    return (
        "Bytes that a call reads from HBM and writes to it, by the hardware's counters, in GB: bf16, 16k tokens, "
        "hidden size 2048, no mask. L2 holds nothing of a call's tensors when it begins, and what it leaves there is "
        "counted as written. `least` is every tensor once; `passes` is every kernel of standard attention reading its "
        "inputs and writing its results once, which is Theta(N d + N^2) for a sequence of N. As all lengths have as "
        f"many tokens, traffic that follows N^2 doubles from each to the next.{grown} The columns of L2 are bytes "
        "between L2 and the SMs, where FlashAttention reads keys and values again for every block of queries; the "
        f"times are those of the kernels under the profiler. {provenance(used)}"
    )


def _span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return low if low == high else f"{low} to {high}"


def _table(used: Sequence[Row]) -> str:
    impls = [impl for impl in TITLES if any(row.impl == impl for row in used)]
    head = ["pass", "head_dim", "seqlen", "least", *(TITLES[impl] for impl in impls), "passes", "standard / flashgen"]
    head += [f"L2, {TITLES[impl]}" for impl in impls] + [f"ms, {TITLES[impl]}" for impl in impls]
    table = [table_row(head), table_row(["---", *("---:" for _ in head[1:])])]
    for suite, name in PASSES.items():
        for w, by_impl in by_workload(row for row in used if row.suite == suite):
            cells = [name, str(w.head_dim), str(w.seqlen_k), _gb(w.bytes)]
            cells += [_gb(hbm_bytes(by_impl[impl]) if impl in by_impl else None) for impl in impls]
            cells += [_gb(standard_traffic_bytes(w)), _ratio(by_impl)]
            cells += [_gb(by_impl[impl].l2_bytes if impl in by_impl else None) for impl in impls]
            cells += [_ms(by_impl.get(impl)) for impl in impls]
            table.append(table_row(cells))
    return "\n".join(table)


def _ratio(by_impl: dict[str, Row]) -> str:
    mine, theirs = (hbm_bytes(by_impl[impl]) if impl in by_impl else None for impl in ("flashgen", "standard"))
    return f"{theirs / mine:.1f}" if mine and theirs else "-"


def _blocks_text(blocks: Sequence[Row]) -> str:
    off = [row.l2_bytes / tiled_bytes(Workload.parse(row.workload), _block_m(row)) for row in blocks if row.l2_bytes]
    said = f" Measured bytes of L2 are {min(off):.2f} to {max(off):.2f} times the model's." if off else ""
    said += MERGED if off and min(off) < 1 - MODEL_ERROR else ""
    return (
        "The portable forward kernel, whose blocks were forced: keys and values are read once for each block of "
        "queries, so that the bytes between L2 and the SMs fall as N^2 d / block_m, and block_n changes nothing "
        f"(`model`: these and q and the output once).{said} HBM is asked only for what L2 does not hold: programs that "
        "run side by side share what they read. Bytes in GB; `K and V` are those of one head. No config spills "
        f"registers. {provenance(blocks)}"
    )


def _blocks_table(blocks: Sequence[Row]) -> str:
    head = ["seqlen", "K and V, MiB", "block_m", "block_n", "L2", "model", "HBM read", "HBM written", "least", "ms"]
    table = [table_row(head), table_row(["---:"] * len(head))]
    for row in blocks:
        w, (block_m, block_n) = Workload.parse(row.workload), blocks_of(row.impl)
        kv_bytes = DTYPE_BYTES[w.dtype] * w.seqlen_k * (w.head_dim + w.head_dim_v)
        cells = [str(w.seqlen_k), f"{kv_bytes / 2**20:.0f}", str(block_m), str(block_n), _gb(row.l2_bytes)]
        cells += [_gb(tiled_bytes(w, block_m)), _gb(row.hbm_read_bytes), _gb(row.hbm_write_bytes), _gb(w.bytes)]
        table.append(table_row([*cells, _ms(row)]))
    return "\n".join(table)


def _block_m(row: Row) -> int:
    return blocks_of(row.impl)[0]


def _gb(size: int | None) -> str:
    """Three digits, which are enough for 0.07 GB beside 2000."""
    if size is None:
        return "-"
    return f"{size / 1e9:.0f}" if size >= 1e11 else f"{size / 1e9:.3g}"


def _ms(row: Row | None) -> str:
    return "-" if row is None or row.median_ms is None else f"{row.median_ms:.3g}"
