"""The sections about the machines: what each device is, and which runs measured on it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from flashgen.core.device import Device
from flashgen.report import figures
from flashgen.report.contents import Contents
from flashgen.report.parts import Section, Table
from flashgen.tuning.history import is_current

MAX_RENDERED = 2000
"""Records whose kernels are rendered to compare them, some milliseconds each."""


def device_section(device: Device, contents: Contents) -> Section:
    """What a device is, and when, with what and how near its peak it was measured."""
    entries = [each for each in contents.entries if each.record.device.identity == device.identity]
    records = [each.record for each in entries]
    clocks = [each.measurement.sm_clock_mhz for each in records if each.measurement and each.measurement.sm_clock_mhz]
    rates = [each.tflops for each in records if each.measurement and each.tflops and not each.workload.is_decode]
    days = sorted(each.created[:10] for each in records if each.created)
    facts: list[tuple[str, str]] = [
        ("identity", device.identity),
        ("SMs", f"{device.num_sms} of {device.arch}"),
        ("memory", f"{device.memory_gb} GB, {device.bandwidth_gbs:g} GB/s by the data sheet"),
        ("shared memory", f"{device.smem_per_block // 1024} KiB a block, {device.smem_per_sm // 1024} KiB an SM"),
        ("registers", f"{device.regs_per_sm} an SM, {device.max_threads_per_sm} threads an SM"),
        ("L2", f"{device.l2_bytes // 2**20} MiB"),
        ("dense bf16 peak", f"{device.peak_tflops:g} TFLOP/s by the data sheet"),
    ]
    if clocks:
        clock = f"{min(clocks):.0f} to {max(clocks):.0f} MHz, median {statistics.median(clocks):.0f}"
        facts.append(("SM clock while measuring", clock))
    if rates and device.peak_tflops:
        facts.append(("fastest record", f"{max(rates):.0f} TFLOP/s, {max(rates) / device.peak_tflops:.0%} of the peak"))
    powers = sorted({each.limits.power_limit_w for each in records if each.limits.power_limit_w})
    if powers:
        facts.append(("power limit", ", ".join(f"{power:g} W" for power in powers)))
    if days:
        facts.append(("made", " to ".join(dict.fromkeys((days[0], days[-1])))))
    parts = ("flashgen", "triton", "torch", "driver")
    facts += [(part, _counted(getattr(each.versions, part) for each in records)) for part in parts]
    facts.append(("hosts", _counted(each.origin.host for each in entries)))
    kinds = Counter((each.workload.direction, each.workload.dtype, each.provenance) for each in records)
    return Section(
        id=f"device-{device.identity}",
        title=f"Device: {device.name}",
        tables=(
            Table(title="What it is", columns=("fact", "value"), rows=tuple(facts), is_open=True),
            Table(
                title="Records",
                columns=("pass", "dtype", "provenance", "records"),
                rows=tuple((*kind, count) for kind, count in sorted(kinds.items())),
            ),
        ),
    )


def stale_section(contents: Contents) -> Section:
    """Which records are of kernels that this flashgen generates no more."""
    title, entries = "Out of date", contents.entries
    if len(entries) > MAX_RENDERED:
        why = f"There are more than {MAX_RENDERED} records: `flashgen db verify` says which are of former kernels."
        return Section(id="stale", title=title, lines=(why,))
    stale = [entry.record for entry in entries if not is_current(entry.record)]
    if not stale:
        why = f"All {len(entries)} records are of kernels that this flashgen still generates."
        return Section(id="stale", title=title, lines=(why,))
    rows = tuple(
        (record.workload.key, record.device.name, record.config.family, record.created[:10]) for record in stale
    )
    return Section(
        id="stale",
        title=title,
        lines=(
            f"{len(stale)} of {len(entries)} records were made with kernels that this flashgen generates in another "
            "way now. They serve on, as the best that is known; `flashgen tune --reverify` times them again.",
        ),
        tables=(Table(title="Records of former kernels", columns=("workload", "device", "family", "made"), rows=rows),),
    )


def runs_section(contents: Contents) -> Section:
    """Who made what is here."""
    columns = ("run", "host", "budget", "first day", "records", "trials")
    rows = tuple(figures.runs(contents))
    return Section(
        id="runs",
        title="Runs",
        lines=("`flashgen report --run` shows one of them alone.",),
        tables=(Table(title="Runs", columns=columns, rows=rows),),
    )


def _counted(values: Iterable[str]) -> str:
    return ", ".join(f"{value or 'unknown'} ({count})" for value, count in Counter(values).most_common()) or "-"
