"""From the results files to `docs/img/`, the benchmark block of README and what docs/attention.md says of repeats.

python -m benchmarks.report            # rewrites them; charts need the extra `report`
python -m benchmarks.report --check    # changes nothing; 1 if a text is not what the files give
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import curves, spread_tables
from benchmarks.memory import MEMORY_SUITE, TRAINING_SUITE
from benchmarks.race_tables import RACES
from benchmarks.results import RESULTS, Row, latest, read_rows
from benchmarks.tables import block
from benchmarks.training import EAGER_SUITE
from benchmarks.training_tables import compared

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "attention.md"
"""The page on gradients, beside the README."""

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
FILES = (
    "forward.csv",
    "backward.csv",
    "forward_backward.csv",
    "models.csv",
    "features.csv",
    "memory.csv",
    "overhead.csv",
    "training.csv",
    "spread.csv",
)
CHARTS = {
    **{suite: suite for suite in RACES},
    "memory": MEMORY_SUITE,
    "training": EAGER_SUITE,
    "training_memory": TRAINING_SUITE,
}
"""Charts by their names, and the suite that must be there for each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 1 with `--check` if README differs from the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the markers")
    parser.add_argument("--images", type=Path, help="folder of the charts (default: docs/img beside the README)")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    images = options.images or options.readme.parent / "docs" / "img"
    devices = load(options.results)
    if not options.check:
        draw(devices, images, options.results)
    changed = [
        path
        for path, text, marks in (
            (options.readme, text_of(devices, _relative(images, options.readme.parent)), (START, END)),
            (options.readme.parent / PAGE, spread_tables.page(devices), (spread_tables.START, spread_tables.END)),
        )
        if path.is_file() and _is_changed(path, text, marks, write=not options.check)
    ]
    print(f"{sum(map(len, devices.values()))} rows of {len(devices)} devices")
    for path in changed:
        print(f"{path} differs: run python -m benchmarks.report" if options.check else f"{path} was rewritten")
    return int(bool(changed) and options.check)


def load(results: Path) -> dict[str, list[Row]]:
    """For each device's folder, in order of their names, the rows that belong together.

    Raises:
        ValueError: a file is damaged.
    """
    found = {}
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        rows = [row for name in FILES if (folder / name).is_file() for row in latest(read_rows(folder / name))]
        if rows:
            found[folder.name] = compared(rows, curves.read(folder / "training_loss.csv"))
    return found


def charts_of(slug: str, rows: Sequence[Row]) -> list[str]:
    """The file names of the charts that these rows give."""
    suites = {row.suite for row in rows}
    return [f"{stem}_{slug}.png" for stem, suite in CHARTS.items() if suite in suites]


def draw(devices: dict[str, list[Row]], images: Path, results: Path) -> None:
    """Write every chart.

    Raises:
        ValueError: the file of losses is damaged.
    """
    from benchmarks import charts

    for slug, rows in devices.items():
        for name in charts_of(slug, rows):
            stem = name.removesuffix(f"_{slug}.png")
            if stem in RACES:
                charts.race_chart(images / name, rows, stem)
            elif stem == "training":
                charts.training_chart(images / name, rows, curves.read(results / slug / "training_loss.csv"))
            elif stem == "training_memory":
                charts.training_memory_chart(images / name, rows)
            else:
                charts.memory_chart(images / name, rows)


def text_of(devices: dict[str, list[Row]], images: str) -> str:
    """The text between the markers; `images` is the folder of the charts as README names it."""
    return "\n".join(
        block(slug, rows, charts=[f"{images}/{name}" for name in charts_of(slug, rows)])
        for slug, rows in devices.items()
    )


def insert(page: str, text: str, marks: tuple[str, str] = (START, END)) -> str:
    """`page` with `text` between its markers.

    Raises:
        ValueError: the markers are not there exactly once each, in order.
    """
    first, last = marks
    head, start, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not start or not end or first in rest or last in tail:
        raise ValueError(f"the page has the markers {first} and {last} once each, in this order")
    return f"{head}{first}\n{text}{last}{tail}"


def _is_changed(path: Path, text: str, marks: tuple[str, str], *, write: bool) -> bool:
    before = path.read_text(encoding="utf-8")
    after = insert(before, text, marks)
    if write and before != after:
        path.write_text(after, encoding="utf-8")
    return before != after


def _relative(images: Path, folder: Path) -> str:
    return images.resolve().relative_to(folder.resolve()).as_posix()


if __name__ == "__main__":
    sys.exit(main())
