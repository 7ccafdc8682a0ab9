"""`Integration`: what `flashgen.integrate` found and did, as values, text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashgen.core.calls import CallRecord
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import printable
from flashgen.core.rungs import RUNGS
from flashgen.integrations.model.proof import NOT_RUN, Comparison, Proof
from flashgen.integrations.model.routes import Route
from flashgen.tuning.from_calls import Gain

COLUMNS = ("layers", "workload", "calls", "rung", "served by", "ms", "share", "a miss costs")
PROVEN = ("compared", "error", "own error", "SDPA's error", "allowed")
WORST = 5
"""Comparisons that text shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """Calls of one workload that the same thing serves, and the layers that make them.

    Attributes:
        layers: paths of modules, in the order in which they first called.
        record: workload, rung, kernel family or backend of torch, config, number of calls, and the ms that one call is
            taken to need.
        miss_ms: what all these calls are taken to lose for want of a record of just their workload: an estimate
            (`flashgen.integrations.model.misses`); 0 with one, None where nothing says it.
    """

    layers: tuple[str, ...]
    record: CallRecord
    miss_ms: float | None = None

    @property
    def served_by(self) -> str:
        """What serves, in words."""
        if self.record.rung:
            return f"{self.record.server} ({RUNGS[self.record.rung]})"
        return "no kernel"


@dataclass(frozen=True, kw_only=True)
class Integration:
    """What `flashgen.integrate` found and did; `str()` is the report as text.

    Attributes:
        model: the model's class.
        door: what its calls come through: "transformers" or "scaled_dot_product_attention".
        device: the GPU that serves, or that `target` names; None where the reference computed and nothing was named.
        by_reference: whether `flashgen.reference` computed.
        has_shapes: whether inputs were given, whose shapes count; without them the model's own dummies ran.
        rows: what serves now, the longest time first.
        before: what served before tuning; `rows` if nothing was tuned.
        gains: what tuning gained, as measured.
        passed_on: calls that torch served, by the reason.
        own: classes of attention that ask nobody and compute on their own.
        proof: whether the model is as exact as with its own attention.
        is_routed: whether the model attends by flashgen now; not where the proof failed.
    """

    model: str
    door: str
    device: Device | None
    by_reference: bool
    has_shapes: bool
    rows: tuple[LayerRow, ...]
    before: tuple[LayerRow, ...]
    gains: tuple[Gain, ...]
    passed_on: dict[str, int]
    own: tuple[str, ...]
    proof: Proof
    is_routed: bool
    _undo: Any = field(default=lambda: None, repr=False, compare=False)

    def undo(self) -> None:
        """Let the model attend as it did before; doing it twice is doing it once."""
        if self.is_routed:
            self._undo()
            object.__setattr__(self, "is_routed", False)

    @property
    def total_ms(self) -> float:
        """What attention of one run is taken to need now."""
        return sum(row.record.total_ms for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The same facts for machines."""
        return {
            "model": self.model,
            "door": self.door,
            "device": None if self.device is None else self.device.identity,
            "by_reference": self.by_reference,
            "has_shapes": self.has_shapes,
            "is_routed": self.is_routed,
            "rows": [_plain_row(row) for row in self.rows],
            "before": [_plain_row(row) for row in self.before],
            "gains": [{**dataclasses.asdict(gain), "workload": gain.workload.key} for gain in self.gains],
            "passed_on": dict(self.passed_on),
            "own": list(self.own),
            "proof": dataclasses.asdict(self.proof),
        }

    def to_json(self) -> str:
        """`to_dict` as text; numbers that are not finite are null."""
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The report for a page of Markdown."""
        parts = [f"# {self.model} by flashgen", self._head(), _markdown(COLUMNS, self._cells()), *self._notes()]
        shown = _worst(self.proof)
        parts += ["## As exact as with its own attention?", self._proven()]
        parts += [_markdown(PROVEN, shown)] if shown else []
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        parts = [self._head(), _aligned(COLUMNS, self._cells()), *self._notes(), self._proven()]
        shown = _worst(self.proof)
        return printable("\n".join([*parts, *([_aligned(PROVEN, shown)] if shown else [])]), lines=True)

    def write(self, path: str | Path) -> None:
        """Write the report to a file: JSON where its name ends in `.json`, Markdown with `.md`, else text.

        Raises:
            OSError: it cannot be written.
        """
        found = Path(path)
        text = {".json": self.to_json, ".md": self.to_markdown}.get(found.suffix, self.__str__)()
        found.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")

    def write_package(self, name: str, folder: str | Path | None = None, *, version: str = "1.0.0") -> Path:
        """Write a package of the measured records of this model's workloads on this GPU, as `flashgen db package` does.

        Args:
            name: of small letters, digits and underscores.
            folder: the new folder; `flashgen-records-<name>` in the present one by default.
            version: of the project.

        Returns:
            The folder.

        Raises:
            DatabaseError: there are no such records, the name or the version is none, or the folder exists.
        """
        from flashgen.db.exchange import export_records
        from flashgen.db.layers import Layers
        from flashgen.db.package_project import write_project

        records = []
        if self.device is not None:
            with Layers.open() as layers:
                wanted = dict.fromkeys(row.record.workload for row in self.rows)
                found = [layers.record(one, self.device, provenance="measured") for one in wanted]
            records = [record for record, _ in filter(None, found)]
        if not records:
            raise DatabaseError("a package needs measured records of the model's workloads, and there are none")
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "records.sqlite3"
            export_records(records, path)
            return write_project(name, path, folder, version=version)

    def _head(self) -> str:
        where = "flashgen.reference" if self.by_reference else str(self.device and self.device.name)
        if self.by_reference and self.device is not None:
            where += f", looked up for {self.device.name}"
        state = "attends by flashgen" if self.is_routed else "attends as before"
        lines = [f"{self.model} {state}, through {self.door}; computed by {where}."]
        total, before = self.total_ms, sum(row.record.total_ms for row in self.before)
        if total:
            now = "" if total == before else f", {before:.4g} ms before tuning"
            lines.append(
                f"Attention of one run takes {total:.4g} ms{now}: an estimate from records, or from the data sheet."
            )
        missed = sum(row.miss_ms or 0.0 for row in self.rows)
        if missed:
            lines.append(f"Without records of their own calls lose about {missed:.4g} ms of it, by an estimate.")
        if self.gains:
            was, now_ms = (sum(getattr(gain, name) for gain in self.gains) for name in _TOTALS)
            lines.append(f"Tuned workloads took {was:.4g} ms before and take {now_ms:.4g} ms now, as measured.")
        return " ".join(lines)

    def _cells(self) -> list[tuple[str, ...]]:
        total = self.total_ms
        return [
            (
                named(row.layers),
                row.record.workload.key,
                str(row.record.calls),
                str(row.record.rung or "-"),
                row.served_by,
                "?" if row.record.call_ms is None else f"{row.record.call_ms:.4g} ({row.record.time_from})",
                f"{row.record.total_ms / total:.1%}" if total else "?",
                "?" if row.miss_ms is None else f"~{row.miss_ms:.4g} ms" if row.miss_ms else "0",
            )
            for row in self.rows
        ]

    def _notes(self) -> list[str]:
        found = [f"Served by torch, {count} calls in all runs: {reason}." for reason, count in self.passed_on.items()]
        if not self.rows and not found:
            found.append("No call of attention was seen: the model has none, or reaches none by this way.")
        if not self.has_shapes:
            found.append(
                "No inputs were given, so a few tokens of the model's own ran and nothing was tuned: "
                "integrate(model, inputs) with the shapes of real calls does that."
            )
        return found + ([f"Classes that compute on their own: {', '.join(self.own)}."] if self.own else [])

    def _proven(self) -> str:
        proof = self.proof
        if proof.status == NOT_RUN:
            return f"Exactness was not compared: {proof.reason}."
        verdict = "As exact as its own attention" if proof.status == "equal" else "NOT as exact as its own attention"
        count = f"{len(proof.outputs)} outputs, {len(proof.gradients)} gradients"
        return (
            f"{verdict}, against the model in {proof.exact_dtype} ({count}; errors at most twice, of gradients thrice)."
        )


_TOTALS = ("total_before_ms", "total_after_ms")


def rows_of(calls: Iterable[Any], misses: Any) -> tuple[LayerRow, ...]:
    """Rows of `LayerCalls`, with what they lose by an estimate, if there is one."""
    rows = [
        LayerRow(layers=one.layers, record=one.record, miss_ms=misses.cost_ms(one.record) if misses else None)
        for one in calls
    ]
    return tuple(sorted(rows, key=lambda row: -row.record.total_ms))


def named(layers: Sequence[str]) -> str:
    """Paths of modules that differ in one number as one: `layers.0-31.self_attn`."""
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(layers):
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1), []).append(path)
    shown = []
    for pattern, paths in groups.items():
        numbers = [path[len(pattern.partition("*")[0]) :].partition(".")[0] for path in paths]
        shown.append(paths[0] if len(paths) == 1 else pattern.replace("*", f"{numbers[0]}-{numbers[-1]}", 1))
    return ", ".join(shown) or "(the model)"


def integration(model: torch.nn.Module, route: Route, **found: Any) -> Integration:
    """The report on a model that may be routed."""
    return Integration(
        model=type(model).__name__,
        door=route.door,
        passed_on=route.passed_on,
        own=route.own,
        _undo=lambda: route.undo(model),
        **found,
    )


def _plain_row(row: LayerRow) -> dict[str, Any]:
    record = row.record
    return {
        "layers": list(row.layers),
        "workload": record.workload.key,
        "calls": record.calls,
        "rung": record.rung,
        "rung_name": RUNGS.get(record.rung),
        "server": record.server,
        "knobs": None if record.config is None else dict(record.config.knobs),
        "call_ms": record.call_ms,
        "time_from": record.time_from,
        "miss_ms": row.miss_ms,
        "miss_is_estimate": row.miss_ms is not None,
    }


def _worst(proof: Proof) -> list[tuple[str, ...]]:
    gradients = tuple(dataclasses.replace(one, name=f"gradient of {one.name}") for one in proof.gradients)
    return [_compared(one) for one in (*proof.outputs[:WORST], *gradients[:WORST])]


def _compared(one: Comparison) -> tuple[str, ...]:
    fused = "" if one.fused_error is None else f"{one.fused_error:.3g}"
    return one.name, f"{one.error:.3g}", f"{one.plain_error:.3g}", fused, f"{one.allowed:.3g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not -float("inf") < value < float("inf") else value


def _markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(printable(cell).replace('|', '/') for cell in row)} |" for row in rows)


def _aligned(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = [columns, *cells]
    widths = [max(len(row[number]) for row in rows) for number in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
