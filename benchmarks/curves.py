"""`training_loss.csv`: the loss of every step of every run, and how far two curves are from each other."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS = ("suite", "workload", "impl", "commit", "step", "loss")

Subject = tuple[str, str, str]
"""Suite, workload and implementation, as in `Row.subject`."""

Curves = dict[Subject, list[float]]


def read(path: Path) -> Curves:
    """The last curve of each subject; none where there is no file.

    Raises:
        ValueError: the file has other columns, a damaged row, or steps out of order.
    """
    found: Curves = {}
    if not path.is_file():
        return found
    with path.open(newline="") as file:
        lines = csv.reader(file)
        if tuple(next(lines, ())) != COLUMNS:
            raise ValueError(f"{path} must have the columns {','.join(COLUMNS)}")
        for suite, workload, impl, _, step, loss in lines:
            curve = found.setdefault((suite, workload, impl), [])
            if step == "0":
                curve.clear()  # measured again
            if int(step) != len(curve):
                raise ValueError(f"{path}: step {step} of {impl} follows step {len(curve) - 1}")
            curve.append(float(loss))
    return found


def start(path: Path) -> None:
    """Begin the file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",".join(COLUMNS) + "\n")


def append(path: Path, subject: Subject, commit: str, losses: Sequence[float]) -> None:
    """Add one curve in one write."""
    if not path.is_file():
        start(path)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows((*subject, commit, step, f"{loss:.5f}") for step, loss in enumerate(losses))


def deviation(curve: Sequence[float], other: Sequence[float]) -> float | None:
    """The mean distance in nats over the steps that both have; None where there is none."""
    distances = [abs(mine - theirs) for mine, theirs in zip(curve, other, strict=False)]
    return statistics.fmean(distances) if distances else None


def of_workload(curves: Mapping[Subject, Sequence[float]], suite: str, workload: str) -> dict[str, Sequence[float]]:
    """The curves of one suite and workload, by implementation."""
    return {impl: curve for (s, w, impl), curve in curves.items() if (s, w) == (suite, workload)}
