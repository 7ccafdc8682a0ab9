"""The page of a report in a real browser: it is laid out, in light and dark and on narrow screens, and runs nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from flashgen.report import page
from flashgen.report.contents import read
from tests.report import databases

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
LOOK = """<script>
addEventListener('load', () => {
  for (const each of document.querySelectorAll('details')) each.open = true;
  const box = each => each.getBoundingClientRect();
  const seen = [...document.querySelectorAll('figure > svg')].map(each => [box(each).width, box(each).height]);
  document.body.dataset.seen = JSON.stringify({
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    ground: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    heads: getComputedStyle(document.querySelector('thead')).position,
    pictures: seen,
    marks: [...document.querySelectorAll('.mark')].filter(each => box(each).width > 2).length,
  });
});
</script>"""
"""What a test adds to a copy of a page without its policy, to ask the browser what it made of it."""

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed, none of {', '.join(NAMES)}")


def opened(path: Path, *options: str) -> str:
    """The document as the browser has it after loading it, without a network."""
    assert BROWSER is not None
    line = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'profile'}", *options),
        *("--dump-dom", path.as_uri()),
    ]
    result = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    return result.stdout


def looked_at(path: Path, *options: str) -> dict[str, object]:
    """What the browser says of the layout of a page."""
    copy = path.with_name("copy.html")
    copy.write_text(POLICY.sub("", path.read_text()).replace("</body>", f"{LOOK}</body>"))
    seen = re.search(r'data-seen="([^"]*)"', opened(copy, *options))
    assert seen is not None
    return dict(json.loads(unescape(seen[1])))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    page.write(read([databases.write(folder / "mine.sqlite3")]), path)
    return path


def test_a_wide_light_page_shows_its_pictures_beside_its_tables(report: Path) -> None:
    seen = looked_at(report, "--window-size=1100,900")
    assert seen["overflow"] == 0
    assert (seen["ground"], seen["heads"]) == ("rgb(255, 255, 255)", "static")
    pictures = seen["pictures"]
    assert isinstance(pictures, list)
    assert len(pictures) >= 6
    assert all(width > 200 and height > 50 for width, height in pictures)
    assert isinstance(seen["marks"], int)
    assert seen["marks"] >= 36  # of the registers alone


def test_a_narrow_dark_page_folds_its_tables(report: Path) -> None:
    seen = looked_at(report, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert seen["overflow"] == 0
    assert (seen["ground"], seen["ink"], seen["heads"]) == ("rgb(20, 23, 28)", "rgb(232, 234, 238)", "absolute")


def test_a_stranger_s_database_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "theirs.html"
    page.write(read([databases.write_hostile(tmp_path / "theirs.sqlite3")]), path)
    document = opened(path)
    assert document[document.index("<title>") :].startswith("<title>flashgen on &lt;script")
    assert "<script" not in document
    assert "<img" not in document


def test_the_policy_alone_stops_a_script(tmp_path: Path, report: Path) -> None:
    path = tmp_path / "attacked.html"
    path.write_text(report.read_text().replace("<main>", "<main><script>document.title = 'owned'</script>"))
    assert "<title>owned" not in opened(path)
    path.write_text(POLICY.sub("", path.read_text()))
    assert "<title>owned" in opened(path)
