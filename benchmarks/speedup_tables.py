"""flashgen over standard attention, and what bounds that ratio: from the rows of the suite `speedup`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import by_workload, provenance, speedup, table_row
from benchmarks.results import Row
from benchmarks.speedup import COMPILED, SPEEDUP_SUITE, STANDARD
from benchmarks.traffic import least_ms, score_passes, standard_least_ms
from flashgen.core.device import CATALOGUE, Device
from flashgen.core.workload import Workload

LONG_CLAIM = (5, 7)
LONG_SEQLEN = 16384
"""What the papers say of long sequences: 5 to 7 times as fast as standard attention."""

TITLES = {STANDARD: "standard", COMPILED: "compiled"}


def speedup_parts(rows: Sequence[Row]) -> list[str]:
    """The section, or nothing if there are no rows."""
    used = [row for row in rows if row.suite == SPEEDUP_SUITE and row.median_ms]
    if not used:
        return []
    device = device_named(used[0].device)
    lines = sorted(by_workload(used), key=lambda line: (line[0].head_dim, line[0].seqlen_k, line[0].causal))
    return ["### Against standard attention", _text(used, lines, device), _table(lines, device)]


def device_named(name: str) -> Device | None:
    """The catalogued device with this name: its data sheet gives bandwidth and rate."""
    return next((device for device in CATALOGUE if device.name == name), None)


def bound(workload: Workload, device: Device) -> float:
    """The ratio where both standard attention and FlashAttention ran at the limits of a device."""
    return standard_least_ms(workload, device) / least_ms(workload, device)


Lines = Sequence[tuple[Workload, dict[str, Row]]]


def _text(used: Sequence[Row], lines: Lines, device: Device | None) -> str:
    text = (
        "Times in ms, and how many times as fast as standard attention flashgen is: bf16, 16k tokens, hidden size "
        f"2048. Standard attention goes over the scores {_passes(lines)}."
    )
    if any(COMPILED in by_impl for _, by_impl in lines):
        text += " `compiled` is the same function through torch.compile, kept from becoming a fused kernel."
    if device is not None:
        text += (
            f" `least` is what the data sheet leaves ({device.bandwidth_gbs / 1e3:.1f} TB/s, {device.peak_tflops:.0f} "
            "TFLOP/s): of standard attention the sum over its kernels, each the longer of its bytes and its "
            "operations; of flashgen the operations of the visible pairs. Their ratio would be the speed-up if both "
            f"ran at these limits.{_reason(lines, device)}"
        )
    return f"{text} {provenance(used)}"


def _passes(lines: Lines) -> str:
    counts = {workload.causal: score_passes(workload) for workload, _ in lines}
    said = [f"{count} times {'with a causal mask' if causal else 'without a mask'}" for causal, count in counts.items()]
    return " and ".join(said)


def _reason(lines: Lines, device: Device) -> str:
    """What the claim at 16k without a mask would take, for each head_dim."""
    said = []
    for w, by_impl in lines:
        measured = speedup(by_impl, STANDARD)
        if w.causal or w.seqlen_k != LONG_SEQLEN or measured is None:
            continue
        speed = by_impl["flashgen"].tflops or 0.0
        said.append(
            f"{measured:.1f} for heads of {w.head_dim}, where the limits give {bound(w, device):.1f} and a factor of "
            f"{LONG_CLAIM[0]} is {speed * LONG_CLAIM[0] / measured:.0f} TFLOP/s (flashgen has {speed:.0f})"
        )
    if not said:
        return ""
    return (
        f" The papers' {LONG_CLAIM[0]} to {LONG_CLAIM[1]} times at 16k, without a mask: {'; '.join(said)}. Of one "
        "hidden size, wider heads have fewer scores to move for as many operations, so there is less to gain."
    )


def _table(lines: Lines, device: Device | None) -> str:
    impls = [impl for impl in (STANDARD, COMPILED) if any(impl in by_impl for _, by_impl in lines)]
    head = ["head_dim", "seqlen", "causal", "flashgen", *(TITLES[impl] for impl in impls)]
    head += [*(f"{TITLES[impl]} / flashgen" for impl in impls), "standard, least", "flashgen, least", "ratio of these"]
    table = [table_row(head), table_row(["---:", "---:", "---", *("---:" for _ in head[3:])])]
    for w, by_impl in lines:
        cells = [str(w.head_dim), str(w.seqlen_k), "yes" if w.causal else "no"]
        cells += [_ms(by_impl[impl].median_ms if impl in by_impl else None) for impl in ("flashgen", *impls)]
        cells += ["-" if (found := speedup(by_impl, impl)) is None else f"{found:.1f}" for impl in impls]
        if device is None:
            cells += ["-"] * 3
        else:
            cells += [_ms(standard_least_ms(w, device)), _ms(least_ms(w, device)), f"{bound(w, device):.1f}"]
        table.append(table_row(cells))
    return "\n".join(table)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
