"""The commit that a measurement is of: of flashgen's own checkout, and of none that happens to lie around it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen._version import __version__
from flashgen.measure.source import version_of_source


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    version_of_source.cache_clear()
    yield
    version_of_source.cache_clear()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout with a package and its templates."""
    root = tmp_path / "checkout"
    for name in ("flashgen/__init__.py", "templates/a.py.jinja", "notes/page.md"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("1\n")
    git(tmp_path, "init", "-q", "checkout")
    git(root, "add", ".")
    git(root, "commit", "-qm", "One")
    return root / "flashgen"


def test_a_checkout_has_its_commit_and_says_when_sources_differ(package: Path) -> None:
    root = package.parent
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    (root / "notes/page.md").write_text("2\n")
    assert version_of_source(package) == f"{__version__}+g{commit}", "a page changes no kernel"
    version_of_source.cache_clear()
    (root / "templates/a.py.jinja").write_text("2\n")
    assert version_of_source(package) == f"{__version__}+g{commit}.dirty"


def test_a_package_that_is_installed_in_another_checkout_has_no_commit(package: Path) -> None:
    installed = package.parent / ".venv/lib/flashgen"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert version_of_source(installed) == __version__


def test_without_a_checkout_or_git_the_commit_is_unknown(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain/flashgen").mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert version_of_source(tmp_path / "plain/flashgen") == __version__
    version_of_source.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version_of_source(package) == __version__
