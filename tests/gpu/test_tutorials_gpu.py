"""The tutorials with a GPU: the blocks that need one, and the others through the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.core.settings import settings
from tests.docs.tutorials import PAGES, blocks, run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


# torch captures an empty graph where it begins a tree of graphs, and hides its own warning of it from all but an error
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def setenv(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        settings.cache_clear()

    assert run(page, with_gpu=True, setenv=setenv) == len(blocks(page))
