"""A decision is one page that says what was, what is and why; its log of attempts stands apart; words are the field's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_is_one_page_that_says_was_is_and_why(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 50
    assert len(text.encode()) <= 4_500
    assert re.findall(r"^\*\*(Was|Is|Why)\.\*\* ", text, re.MULTILINE) == ["Was", "Is", "Why"]


def test_a_log_of_attempts_belongs_to_a_decision() -> None:
    for log in (ROOT / "docs/experiments").glob("*.md"):
        decision = ROOT / "docs/decisions" / log.name
        assert decision.is_file(), log.name
        assert f"(../experiments/{log.name}" in decision.read_text()
        assert f"(../decisions/{log.name}" in log.read_text()
