"""Without a GPU its tests are collected, once: their modules import, and their parameters are those of their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import in_turns

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


@pytest.mark.parametrize(
    ("worker", "gpus", "visible"),
    [
        ("gw0", ["0", "1", "2"], "0,1,2"),
        ("gw1", ["0", "1", "2"], "1,2,0"),
        ("gw5", ["0", "1", "2"], "2,0,1"),
        ("gw7", ["GPU-5a", "GPU-6b"], "GPU-6b,GPU-5a"),
        ("gw3", ["4"], "4"),
    ],
)
def test_workers_take_turns_in_having_a_gpu_first(worker: str, gpus: list[str], visible: str) -> None:
    assert in_turns(worker, gpus) == visible
