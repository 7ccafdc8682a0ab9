"""`training_loss.csv` and `training_accuracy.csv`: a number for each step of a run, and how far apart two are."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.results import Subject

COLUMNS = ("suite", "workload", "impl", "commit", "step")
"""Behind them comes what the file has, its `what`."""

LOSS, ACCURACY = "loss", "accuracy"
FILES = {LOSS: "training_loss.csv", ACCURACY: "training_accuracy.csv"}
"""The names of the files, beside training.csv."""

LAST = 50
"""Steps at the end of a run, over which its loss and accuracy are taken."""

Curves = dict[Subject, list[float]]
"""By suite, workload and implementation, as in `Row.subject`."""


def read(path: Path, what: str = LOSS) -> Curves:
    """The last curve of each subject; none where there is no file.

    Raises:
        ValueError: the file has other columns, a damaged row, or steps out of order.
    """
    found: Curves = {}
    if not path.is_file():
        return found
    with path.open(newline="") as file:
        lines = csv.reader(file)
        if tuple(next(lines, ())) != (*COLUMNS, what):
            raise ValueError(f"{path} must have the columns {','.join((*COLUMNS, what))}")
        for suite, workload, impl, _, step, value in lines:
            curve = found.setdefault((suite, workload, impl), [])
            if step == "0":
                curve.clear()  # measured again
            if int(step) != len(curve):
                raise ValueError(f"{path}: step {step} of {impl} follows step {len(curve) - 1}")
            curve.append(float(value))
    return found


Line = tuple[str, ...]
"""One line of the file, by its columns."""


def join(paths: Sequence[Path], place: Callable[[str, str], tuple[int, int]]) -> list[Line]:
    """The lines of several files, ordered by the place of their suite and workload.

    Raises:
        ValueError: a curve is in two of them, or they are of different commits.
    """
    owners: dict[Line, Path] = {}
    found: list[Line] = []
    for path in paths:
        with path.open(newline="") as file:
            lines = [tuple(line) for line in csv.reader(file)][1:]
        for subject in {line[:3] for line in lines}:
            if subject in owners:
                raise ValueError(
                    f"a curve is in one file alone, got {' '.join(subject)} in {owners[subject]} and {path}"
                )
            owners[subject] = path
        found += lines
    commits = sorted({line[3] for line in found})
    if len(commits) > 1:
        raise ValueError(f"the curves of {paths[0].name} are all of one commit, got {' and '.join(commits)}")
    return sorted(found, key=lambda line: place(line[0], line[1]))


def write(path: Path, lines: Sequence[Line], what: str = LOSS) -> None:
    """Write the whole file anew."""
    start(path, what)
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def start(path: Path, what: str = LOSS) -> None:
    """Begin the file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",".join((*COLUMNS, what)) + "\n")


def append(path: Path, subject: Subject, commit: str, values: Sequence[float], what: str = LOSS) -> None:
    """Add one curve in one write."""
    if not path.is_file():
        start(path, what)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows((*subject, commit, step, f"{value:.5f}") for step, value in enumerate(values))


def deviation(curve: Sequence[float], other: Sequence[float]) -> float | None:
    """The mean distance in nats over the steps that both have; None where there is none."""
    distances = [abs(mine - theirs) for mine, theirs in zip(curve, other, strict=False)]
    return statistics.fmean(distances) if distances else None


def last_mean(curve: Sequence[float]) -> float | None:
    """The mean of the last `LAST` steps; None where there is none."""
    return statistics.fmean(curve[-LAST:]) if curve else None


def of_workload(curves: Mapping[Subject, Sequence[float]], suite: str, workload: str) -> dict[str, Sequence[float]]:
    """The curves of one suite and workload, by implementation."""
    return {impl: curve for (s, w, impl), curve in curves.items() if (s, w) == (suite, workload)}
