"""Every block of the tutorials runs on a machine without a GPU, but for those that say that they need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.core.rungs import MEANINGS, RUNGS
from flashgen.core.settings import settings
from tests.docs.tutorials import PAGES, ROOT, blocks, run
from tests.tiers import only

QUICK = [page for page in PAGES if page.stem not in ("add-a-kernel", "new-gpu", "records-package")]
"""Those that take a second at most."""


@pytest.mark.parametrize("page", only(PAGES, *QUICK), ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def setenv(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        settings.cache_clear()

    assert run(page, with_gpu=False, setenv=setenv) >= 2


def test_a_block_that_fails_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    wrong = {
        "```python\nassert 1 == 2, 3\n```\n": "3",
        "```bash\nflashgen explain nonsense\n```\n": "tokens",
        "```bash\nflashgen --version\n```\n\n```text\nrung 9\n```\n": "rung 9",
        "```bash\nrm -r /\n```\n": "rm",
    }
    for text, message in wrong.items():
        page.write_text(f"# Page\n\n{text}")
        with pytest.raises(AssertionError, match=message):
            run(page, with_gpu=False, setenv=monkeypatch.setenv)
    page.write_text("# Page\n\n<!-- gpu -->\n```python\nassert 1 == 2\n```\n")
    assert run(page, with_gpu=False, setenv=monkeypatch.setenv) == 0


def test_blocks_that_need_a_gpu_are_few() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert len(PAGES) == 8
    assert sum(block.needs_gpu for block in every) * 3 <= len(every)


def test_the_ladder_of_the_glossary_is_that_of_explain() -> None:
    text = (ROOT / "docs/glossary.md").read_text()
    for rung, name in RUNGS.items():
        assert f"| {rung} | {name} | {MEANINGS[rung]} |" in text
