"""What every test shares: directories of its own, the golden option, and which tests belong to this process."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen.core.settings import settings
from tests.logged import Logged
from tests.remembered import remember

with contextlib.suppress(ModuleNotFoundError):  # the GPU tests do without it
    import hypothesis

    # a deadline per example fails on a busy machine, and a failure in CI must be one that can be repeated
    hypothesis.settings.register_profile("flashgen", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("flashgen")

# compiled kernels stay in the checkout: a second run is quick, and a home directory is not needed
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "triton"))
# the same machine code in nine tenths of the time: which line of a text it comes from is for debuggers alone
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

GPU_TESTS = Path(__file__).parent / "gpu"

# Triton decides when a kernel is defined whether it is interpreted, so a process does either one or the other.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is rendered now")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Each process would import 40 modules to leave out all that they have: tests/test_gpu_tests.py does it once."""
    return True if collection_path == GPU_TESTS and "not gpu" in config.option.markexpr else None


class Backwards(pytest.Dir):
    """A folder whose last file comes first."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return reversed(list(super().collect()))


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Every other process begins at the end, where it finds no file that another one has rewritten the asserts of.

    Of a clean checkout each would do so with all files at the same time as the others: half of what it takes to begin.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return Backwards.from_parent(parent, path=path) if int(worker) % 2 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In one order, from wherever a process began: that of folders."""
    items.sort(key=lambda item: item.path)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: searching it for garbage again and again took a sixth of the time of the tests."""
    remember()
    logging.getLogger().addHandler(logging.NullHandler())  # where nobody else listens, Python prints warnings
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


TOGETHER = 8


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out TOGETHER tests of a file at a time, beside groups: most take less time than it takes to ask for one.

    The parts are handed out by their size, so that single tests, of small files, are the last ones.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    parts: dict[str, str] = {}
    counts: Counter[str] = Counter()

    class InParts(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            if scope == nodeid and nodeid not in parts:
                file = nodeid.partition("::")[0]
                parts[nodeid] = f"{file} {counts[file] // TOGETHER}"
                counts[file] += 1
            return parts.get(nodeid, scope)

    return InParts(config, log)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test of this process has its home.

    pytest looks through all of a folder for the next number: of thousands of homes in its own one took 4 ms.
    """
    return tmp_path_factory.mktemp("homes")


@pytest.fixture
def logged() -> Iterator[Logged]:
    """What the test logs."""
    handler = Logged()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def no_knob_left() -> Iterator[None]:
    """No test leaves a knob of Triton's with a value: its variable would say nothing in the tests that follow.

    `monkeypatch.setattr` leaves one, since what it restores is what was read: set the variable instead.
    """
    yield
    if "triton.knobs" in sys.modules:
        assert not vars(sys.modules["triton.knobs"].cache)
        assert not vars(sys.modules["triton.knobs"].compilation)


@pytest.fixture(autouse=True)
def own_settings(homes: Path, no_knob_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user database and a cache of the test's own: no test reads or writes those of the person who runs it."""
    home = Path(tempfile.mkdtemp(dir=homes))
    for name in [name for name in os.environ if name.startswith("FLASHGEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLASHGEN_DB", str(home / "tuning.sqlite3"))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(home / "cache"))
    settings.cache_clear()
    yield home
    settings.cache_clear()
