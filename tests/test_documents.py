"""A decision is one page that says what was, what is and why; its log of attempts stands apart; paths exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_is_one_page_that_says_was_is_and_why(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 45
    assert len(text.encode()) <= 4_000
    assert re.findall(r"^\*\*(Was|Is|Why)\.\*\* ", text, re.MULTILINE) == ["Was", "Is", "Why"]


def test_a_log_of_attempts_belongs_to_a_decision() -> None:
    for log in (ROOT / "docs/experiments").glob("*.md"):
        decision = ROOT / "docs/decisions" / log.name
        assert decision.is_file(), log.name
        assert f"(../experiments/{log.name}" in decision.read_text()
        assert f"(../decisions/{log.name}" in log.read_text()


SOURCES = ("flashgen", "templates", "scripts", "benchmarks", "tests", "examples")
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(found for name in ("docs", *SOURCES) for found in (ROOT / name).rglob("*.md")))
    if path != ROOT / "docs/supported.md"  # whose reasons are the families' own
)
OLD_WORDS = {"copy engine": "TMA", "matrix unit": "tensor cores", "multiprocessor": "SM"}


def test_pages_that_sources_name_exist() -> None:
    """Comments and docstrings lead to decisions and other pages by their path from the root."""
    found = 0
    for source in (path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".jinja")):
        for named in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text(encoding="utf-8")):
            found += 1
            assert (ROOT / named).is_file(), f"{source.relative_to(ROOT)} names {named}"
    assert found > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for old, word in OLD_WORDS.items():
        assert old not in text.lower(), f"{page.relative_to(ROOT)} says {old!r} instead of {word!r}"


def test_every_page_of_the_folder_is_in_its_list() -> None:
    listed = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs").iterdir():
        if path.name not in ("README.md", "img"):
            assert f"({path.name})" in listed, path.name
