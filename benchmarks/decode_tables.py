"""The table of decoding, from the rows of `decode.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.decode_cases import MORE_SUITE
from benchmarks.decode_cases import SUITE as DECODE_SUITE
from benchmarks.markdown import mean, provenance, table_row
from benchmarks.results import Row
from flashgen.core.workload import Workload

TITLES = {
    "flashgen": "flashgen",
    "flashgen-fixed": "in splits of 1024",
    "sdpa-cudnn": "SDPA cuDNN",
    "sdpa-flash": "SDPA flash",
    "fa3": "FA3",
    "fa4": "FA4",
    "vllm": "vLLM Triton",
}
PROFILES = {"same": "", "ramp": "1 to ", "tail": "one of ", "one_long": "one of "}
"""What stands before the longest length of a profile, whose last name is a former one."""


def decode_parts(rows: Sequence[Row]) -> list[str]:
    """The section of decoding, or nothing if it has no rows."""
    used = [row for row in rows if row.suite in (DECODE_SUITE, MORE_SUITE) and row.median_ms]
    return ["### Decoding", _text(used), _table(used)] if used else []


def by_step(rows: Sequence[Row]) -> list[tuple[Workload, str, dict[str, Row]]]:
    """The rows of each workload and profile of lengths by implementation, in the order of the file."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.workload, row.data), {})[row.impl] = row
    return [(Workload.parse(key), profile, by_impl) for (key, profile), by_impl in found.items()]


def _text(used: Sequence[Row]) -> str:
    said = []
    for impl in ("sdpa-cudnn", "fa3", "fa4", "vllm"):
        ratios = [
            by_impl[impl].median_ms / by_impl["flashgen"].median_ms  # type: ignore[operator]
            for _, _, by_impl in by_step(used)
            if impl in by_impl and "flashgen" in by_impl
        ]
        if ratios:
            said.append(f"{mean(ratios)} of the speed of {TITLES[impl]} on {len(ratios)} steps that it runs")
    compared = f" flashgen has {' and '.join(said)}, in the geometric mean." if said else ""
    return (
        "One step of decoding in bf16 over caches, microseconds of the device from CUDA graphs whose calls find no key "
        "in the L2 cache, and the GB/s of keys and values. `1 to` is a batch of lengths in equal steps, `one of` a "
        "batch of which one sequence is that long and all others a 64th of it. The shipped records serve, those of "
        "near workloads, too, and a rule where splits have a fixed size. FA4 does not split the keys of a sequence on "
        f"Hopper.{compared} {provenance(used)}"
    )


def _table(used: Sequence[Row]) -> str:
    present = [impl for impl in TITLES if any(row.impl == impl for row in used)]
    heads = ["batch x keys", "heads", "d", "cache", "features", *(TITLES[impl] for impl in present), "GB/s"]
    lines = [table_row(heads), table_row(["---"] * len(heads))]
    for workload, profile, by_impl in by_step(used):
        w = workload
        queries = f", {w.seqlen_q} queries" if w.seqlen_q > 1 else ""
        cells = [f"{w.batch} x {PROFILES[profile]}{w.seqlen_k}{queries}", f"{w.nheads}/{w.nheads_k}", str(w.head_dim)]
        cells += ["contiguous" if w.page_size is None else f"pages of {w.page_size}", _features(w)]
        cells += [_us(by_impl.get(impl)) for impl in present]
        rate = by_impl["flashgen"].gbps if "flashgen" in by_impl else None
        lines.append(table_row([*cells, "-" if rate is None else f"{rate:.0f}"]))
    return "\n".join(lines)


def _features(w: Workload) -> str:
    parts = ["sinks"] if w.sink else []
    parts += [f"window {w.window_left + 1}"] if w.window_left is not None else []
    return ", ".join(parts) or "-"


def _us(row: Row | None) -> str:
    return "-" if row is None or row.median_ms is None else f"{1e3 * row.median_ms:.1f}"
