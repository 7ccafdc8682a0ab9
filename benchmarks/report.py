"""From the results files to `docs/img/`, docs/benchmarks.md, README's summary and parts of two pages.

docs/attention.md has what repeats differ by, docs/models.md the tokens per second of whole models.

python -m benchmarks.report            # rewrites them; charts need the extra `report`
python -m benchmarks.report --check    # changes nothing; 1 if a text is not what the files give
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import (
    curves,
    fallback,
    from_nothing,
    repeatability,
    reverify,
    search_files,
    spread_tables,
    transformers_tables,
)
from benchmarks.io_cases import FORWARD_SUITE as IO_SUITE
from benchmarks.markdown import RAW
from benchmarks.memory import MEMORY_SUITE, TRAINING_SUITE
from benchmarks.race_tables import RACES
from benchmarks.results import RESULTS, Row, read_rows
from benchmarks.suites import DATA_SUITE
from benchmarks.summary_tables import summary
from benchmarks.tables import block
from benchmarks.training_tables import compared
from benchmarks.training_tasks import BERT_SUITE, EAGER_SUITE, PATHS_SUITE

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "benchmarks.md"
"""All tables: written as a whole. This path and the next are relative to the folder of README."""

SPREAD_PAGE = Path("docs") / "attention.md"
MODELS_PAGE = Path("docs") / "models.md"
"""The pages on gradients and on models of transformers: written between their markers."""

IMAGES = Path("docs") / "img"

HEAD = """\
# Benchmarks

<!-- Written by `python -m benchmarks.report` from benchmarks/results; a test compares. Do not edit. -->

Every figure comes from the CSV files in [benchmarks/results](../benchmarks/results), whose rows name the machine, the
versions and the commit. [benchmarks/README.md](../benchmarks/README.md) says what each benchmark measures and how to
run it again.
"""

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
FILES = (
    "forward.csv",
    "backward.csv",
    "forward_backward.csv",
    "data.csv",
    "accuracy.csv",
    "unseen.csv",
    "regressions.csv",
    "models.csv",
    "models_transformers.csv",
    "decode.csv",
    "varlen.csv",
    "packed_training.csv",
    "features.csv",
    "functions.csv",
    "dropout.csv",
    "memory.csv",
    "overhead.csv",
    "training.csv",
    "spread.csv",
    "io.csv",
)
CHARTS = {
    **{suite: suite for suite in RACES},
    "data": DATA_SUITE,
    "memory": MEMORY_SUITE,
    "training": EAGER_SUITE,
    "bert": BERT_SUITE,
    "paths": PATHS_SUITE,
    "training_memory": TRAINING_SUITE,
    "io": IO_SUITE,
}
"""Charts by their names, and the suite that must be there for each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 1 with `--check` if a text differs from what the files give."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the markers")
    parser.add_argument("--images", type=Path, help="folder of the charts (default: docs/img beside README)")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    folder = options.readme.parent
    images = options.images or folder / IMAGES
    devices = load(options.results)
    if not options.check:
        draw(devices, images, options.results)
    print(f"{sum(map(len, devices.values()))} rows of {len(devices)} devices")
    changed = [
        page for page in _pages(folder, options.readme, images, options.results, devices) if page.before != page.after
    ]
    for page in changed:
        if not options.check:
            page.path.parent.mkdir(parents=True, exist_ok=True)
            page.path.write_text(page.after, encoding="utf-8")
        print(f"{page.path} {'differs: run python -m benchmarks.report' if options.check else 'was rewritten'}")
    return int(bool(changed) and options.check)


def load(results: Path) -> dict[str, list[Row]]:
    """For each device's folder, in order of their names, all of its rows.

    Raises:
        ValueError: a file is damaged.
    """
    found = {}
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        rows = [row for name in FILES if (folder / name).is_file() for row in read_rows(folder / name)]
        if rows:
            found[folder.name] = compared(rows, *(curves.read(folder / n, w) for w, n in curves.FILES.items()))
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
    from benchmarks import charts, data_chart, io_chart

    for slug, rows in devices.items():
        for name in charts_of(slug, rows):
            stem = name.removesuffix(f"_{slug}.png")
            if stem in RACES:
                charts.race_chart(images / name, rows, stem)
            elif stem in ("training", "bert", "paths"):
                _draw_training(images / name, stem, rows, results / slug)
            elif stem == "training_memory":
                charts.training_memory_chart(images / name, rows)
            elif stem == "data":
                data_chart.data_chart(images / name, rows)
            elif stem == "io":
                io_chart.io_chart(images / name, rows)
            else:
                charts.memory_chart(images / name, rows)


def _draw_training(path: Path, stem: str, rows: Sequence[Row], folder: Path) -> None:
    from benchmarks import charts

    losses, accuracies = (curves.read(folder / name, what) for what, name in curves.FILES.items())
    if stem == "training":
        charts.training_chart(path, rows, losses)
    elif stem == "bert":
        charts.bert_chart(path, rows, losses)
    else:
        charts.paths_chart(path, rows, losses, accuracies)


def with_kernels(devices: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """The devices on which more was measured than whole models, whose table is in docs/models.md."""
    whole = transformers_tables.TITLES
    return {slug: rows for slug, rows in devices.items() if any(row.suite not in whole for row in rows)}


def summary_of(devices: dict[str, list[Row]]) -> str:
    """The text between README's markers. README is also the page of the package index, so it names charts in full."""
    found = (
        summary(slug, rows, charts=[f"{RAW}/{IMAGES.as_posix()}/{name}" for name in charts_of(slug, rows)])
        for slug, rows in with_kernels(devices).items()
    )
    return "\n".join(text for text in found if text)


SEARCHES = {
    from_nothing.FILE: ("What a search finds by itself", from_nothing.page),
    fallback.FILE: ("Shapes without a record", fallback.page),
    repeatability.FILE: ("Tuned twice", repeatability.page),
    reverify.FILE: ("Records timed again", reverify.page),
}
"""Files of races with rows of their own, and what is said of them."""


def searches_of(results: Path) -> str:
    """The part of docs/benchmarks.md on searches, of every device that has such files; empty without."""
    parts = []
    for path in (path for name in SEARCHES for path in sorted(results.glob(f"*/{name}"))):
        rows = search_files.read(path)
        title, page = SEARCHES[path.name]
        if rows:
            with_what = f"{rows[0]['device']}, torch {rows[0]['torch']}, Triton {rows[0]['triton']}"
            parts += [f"## {title}", "", page(rows), f"{with_what}, commit {rows[0]['commit']}, {rows[0]['date']}.", ""]
    return "".join(f"{line}\n" for line in ["", *parts]) if parts else ""


def page_of(devices: dict[str, list[Row]], images: str) -> str:
    """docs/benchmarks.md but for its part on searches; `images` is the folder of the charts as the page names it."""
    blocks = (
        block(slug, rows, charts=[f"{images}/{name}" for name in charts_of(slug, rows)])
        for slug, rows in with_kernels(devices).items()
    )
    return "\n".join([HEAD, *blocks])


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


class _Page(NamedTuple):
    """A file, the text that it has, and the text that the results give."""

    path: Path
    before: str
    after: str


def _pages(folder: Path, readme: Path, images: Path, results: Path, devices: dict[str, list[Row]]) -> Iterator[_Page]:
    text = readme.read_text(encoding="utf-8")
    yield _Page(readme, text, insert(text, summary_of(devices)))
    page = folder / PAGE
    relative = Path(os.path.relpath(images, page.parent)).as_posix()
    told = page_of(devices, relative) + searches_of(results)
    yield _Page(page, page.read_text(encoding="utf-8") if page.is_file() else "", told)
    for path, tables in ((SPREAD_PAGE, spread_tables), (MODELS_PAGE, transformers_tables)):
        if (folder / path).is_file():
            text = (folder / path).read_text(encoding="utf-8")
            yield _Page(folder / path, text, insert(text, tables.page(devices), (tables.START, tables.END)))


if __name__ == "__main__":
    sys.exit(main())
