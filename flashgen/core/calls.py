"""`CallRecord` and files of them: which workloads a process called, how often, and what served them.

The form of a file is JSON with a version. Processes add to the same file: each of them takes a lock, reads what is
there, adds its counts and puts a whole new file in its place, so that a reader never sees half of one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.core.checks import MAX_INTEGER, real_number, text, whole_number
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import WorkloadError
from flashgen.core.files import locked, read_text
from flashgen.core.folders import write_whole
from flashgen.core.quoting import shown
from flashgen.core.workload import DTYPE_BYTES, Workload

FORMAT, VERSION = "flashgen calls", 1

MOST_BYTES = 64 * 2**20
MOST_RECORDS = 20_000
"""Of one file; beyond that, those with the least time are left out."""

USUAL_SHARE = 0.5
"""Of the data sheet's rates: what a kernel is taken to reach of which nothing is measured."""

TIMES_FROM = ("record", "nearest", "rate", "")
"""Where the time of a call comes from: the record of the workload, the nearest one scaled, the data sheet, nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """Calls of one workload on one GPU that the same thing served.

    Attributes:
        workload: what was computed.
        device: identity of the GPU, empty where the tensors were on none.
        rung: of the ladder; 0 where nothing of flashgen's serves the call and an error said so.
        server: the kernel family, the backend of torch's attention, or empty for a call that was refused.
        config: what was launched; None where torch or nothing served.
        calls: how many, at most 2**63 - 1.
        call_ms: what a call is taken to need, in ms; None where nothing says it. It is not measured in the process.
        time_from: where `call_ms` comes from, one of `TIMES_FROM`.
    """

    workload: Workload
    device: str
    rung: int
    server: str
    config: Config | None = None
    calls: int
    call_ms: float | None = None
    time_from: str = ""

    @property
    def identity(self) -> tuple[Workload, str, int, str, Config | None]:
        """What two records have in common that count the same calls."""
        return self.workload, self.device, self.rung, self.server, self.config

    @property
    def total_ms(self) -> float:
        """Time of all calls, 0 where nothing says what one needs."""
        return self.calls * (self.call_ms or 0.0)


def usual_ms(workload: Workload, device: Device) -> float:
    """A time in ms by the data sheet alone: half of the architecture's rates of tensor cores and of memory."""
    row = device.architecture
    flops_per_ms = device.num_sms * row.mma_flops * row.boost_ghz * 1e6 / (DTYPE_BYTES[workload.dtype] // 2)
    return max(workload.flops / flops_per_ms, workload.bytes / (row.bandwidth_gbs * 1e6)) / USUAL_SHARE


def merged(*groups: Iterable[CallRecord]) -> tuple[CallRecord, ...]:
    """All records, those of one identity as one with the sum of their calls and the last known time; longest first.

    A sum ends at `MAX_INTEGER`, the most that a file may say.
    """
    found: dict[tuple[object, ...], CallRecord] = {}
    for record in itertools.chain.from_iterable(groups):
        before = found.get(record.identity)
        known = before if before is not None and record.call_ms is None else record
        calls = record.calls + (before.calls if before is not None else 0)
        found[record.identity] = replace(known, calls=min(calls, MAX_INTEGER))
    ordered = sorted(found.values(), key=lambda one: (-one.total_ms, -one.calls, one.workload.key))
    return tuple(ordered[:MOST_RECORDS])


def read_calls(path: Path) -> tuple[CallRecord, ...]:
    """The records of a file.

    Raises:
        WorkloadError: there is no such file, or it is none of this form and version.
    """
    content = read_text(path, what="a file of calls", most_bytes=MOST_BYTES, error=WorkloadError)
    try:
        read = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"a file of calls is JSON, got {shown(str(path))}: {error}") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT or not isinstance(read.get("calls"), list):
        raise WorkloadError(f"a file of calls has the format {FORMAT!r} and a list of calls, got {shown(str(path))}")
    if read.get("version") != VERSION:
        raise WorkloadError(f"a file of calls has version {VERSION}, got {shown(read.get('version'))}")
    if len(read["calls"]) > MOST_RECORDS:
        raise WorkloadError(f"a file of calls has at most {MOST_RECORDS} of them, got {len(read['calls'])}")
    return merged(_record(row, f"{path.name}, calls[{number}]") for number, row in enumerate(read["calls"]))


def add_calls(path: Path, records: Iterable[CallRecord]) -> None:
    """Add counts to a file, which need not be there yet; safe where other processes do the same.

    Raises:
        WorkloadError: what is there is no file of calls.
        OSError: it cannot be written, or another process keeps its lock.
    """
    path = path.resolve()  # a link stays one
    with locked(path.with_name(f".{path.name}.lock")):
        before = read_calls(path) if path.exists() else ()
        write_whole(path, _text(merged(before, records)).encode())


def time_shares(records: Iterable[CallRecord]) -> list[float]:
    """The share of each record in the time of all of them."""
    times = [record.total_ms for record in records]
    total = sum(times)
    return [time / total if total else 0.0 for time in times]


def _text(records: tuple[CallRecord, ...]) -> str:
    rows = [json.dumps(_row(*pair), separators=(",", ":")) for pair in zip(records, time_shares(records), strict=True)]
    listed = ",\n".join(f"  {row}" for row in rows)
    return f'{{"format":"{FORMAT}","version":{VERSION},"calls":[\n{listed}\n]}}\n'


def _row(record: CallRecord, share: float) -> dict[str, object]:
    return {
        "workload": record.workload.key,
        "calls": record.calls,
        "time_share": round(share, 6),
        "call_ms": record.call_ms,
        "time_from": record.time_from,
        "device": record.device,
        "rung": record.rung,
        "server": record.server,
        "knobs": None if record.config is None else dict(record.config.knobs),
    }


def _record(row: object, where: str) -> CallRecord:
    try:
        if not isinstance(row, dict):
            raise WorkloadError(f"a call is a mapping, got {shown(row)}")
        server, knobs, call_ms = text("server", row.get("server"), most=100), row.get("knobs"), row.get("call_ms")
        if call_ms is not None and not 0 < real_number("call_ms", call_ms) < float("inf"):
            raise WorkloadError(f"call_ms is finite and above 0, got {call_ms}")
        if row.get("time_from") not in TIMES_FROM:
            raise WorkloadError(f"time_from is one of {TIMES_FROM}, got {shown(row.get('time_from'))}")
        return CallRecord(
            workload=Workload.parse(text("workload", row.get("workload"))),
            device=text("device", row.get("device"), most=100),
            rung=whole_number("rung", row.get("rung"), 0, 8),
            server=server,
            config=None if knobs is None else Config.of(server, knobs),
            calls=whole_number("calls", row.get("calls"), 1, MAX_INTEGER),
            call_ms=call_ms,
            time_from=row["time_from"],
        )
    except ValueError as error:  # all of flashgen's of this kind, too
        raise WorkloadError(f"{where}: {error}") from error
