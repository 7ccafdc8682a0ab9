"""Without a GPU its tests are collected, once: their modules import, and their parameters are those of their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"


class Collected:
    """What a collection found, and what it failed at."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.modules = {item.path.name for item in items}


def test_the_tests_of_a_gpu_are_collected() -> None:
    found = Collected()
    plain = "--strict-markers --strict-config --import-mode=importlib --assert=plain --noconftest"
    without = [part for name in ("cacheprovider", "terminal", "xdist") for part in ("-p", f"no:{name}")]
    pytest.main(["--collect-only", "-m", "gpu", "-o", f"addopts={plain}", *without, str(FOLDER)], plugins=[found])
    assert found.errors == []
    assert found.modules == {path.name for path in FOLDER.glob("test_*.py")}
