"""The committed results: each file was measured with one commit, which is in the history as it was measured."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks.results import RESULTS

FILES = sorted(RESULTS.glob("*/*.csv"))


def faults(path: Path) -> list[str]:
    """What is wrong with the commits of a file's rows."""
    with path.open(newline="") as file:
        commits = sorted({row["commit"] for row in csv.DictReader(file)})
    several = [f"rows of {' and '.join(commits)}"] if len(commits) != 1 else []
    return several + [f"commit {commit}" for commit in commits if re.fullmatch("[0-9a-f]{12}", commit) is None]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_has_rows_of_one_clean_commit(path: Path) -> None:
    """A commit with `-dirty` behind it is none that anybody could measure again."""
    assert not faults(path)


@pytest.mark.parametrize(
    ("commits", "found"),
    [
        (["0123456789ab"] * 2, []),
        (["0123456789ab", "ba9876543210"], ["rows of 0123456789ab and ba9876543210"]),
        (["0123456789ab-dirty"], ["commit 0123456789ab-dirty"]),
        ([], ["rows of "]),
    ],
)
def test_faults_are_found(commits: list[str], found: list[str], tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_text("\n".join(["impl,commit", *(f"x,{commit}" for commit in commits)]) + "\n")
    assert faults(path) == found
