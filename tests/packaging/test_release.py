"""`make release` refuses what is not ready, and community files say what is true."""

from __future__ import annotations

import os
import re
import subprocess
from email.message import Message
from pathlib import Path

import pytest
import yaml

from flashgen._version import __version__
from scripts import release
from scripts.release import (
    problems_of_changelog,
    problems_of_description,
    problems_of_metadata,
    problems_of_tree,
    version_of,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository that is ready for a release of 1.2.0."""
    (tmp_path / "flashgen").mkdir()
    (tmp_path / "flashgen/_version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2026-11-23)\n\n## 1.1.0 (2026-10-01)\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "All of it")
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    who = (
        "-c",
        "user.name=x",
        "-c",
        "user.email=x@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    subprocess.run(["git", "-C", str(tree), *who, *arguments], check=True, capture_output=True)


def test_a_tree_that_is_ready_has_no_problems(tree: Path) -> None:
    assert version_of(tree) == "1.2.0"
    assert list(problems_of_tree(tree, "1.2.0")) == []
    assert list(problems_of_changelog(tree, "1.2.0")) == []


def test_a_dirty_tree_a_branch_and_a_tag_are_refused(tree: Path) -> None:
    git(tree, "tag", "--annotate", "v1.2.0", "--message", "x")
    git(tree, "switch", "--quiet", "--create", "other")
    for number in range(5):
        (tree / f"new{number}").touch()
    dirty, branch, tag = problems_of_tree(tree, "1.2.0")
    assert dirty == "a release is made of a clean tree, got new0, new1, new2 and 2 more"
    assert branch == "a release is made on main, got other"
    assert "the tag v1.2.0 is there" in tag


@pytest.mark.parametrize("heading", ["1.2.0 (unreleased)", "1.1.0 (2026-10-01)", "1.2.0", "1x2.0 (2026-11-23)"])
def test_a_changelog_without_the_version_and_its_date_is_refused(tree: Path, heading: str) -> None:
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")
    (problem,) = problems_of_changelog(tree, "1.2.0")
    assert problem.endswith(f"got `## {heading}`")


def test_a_citation_of_another_version_is_refused(tree: Path) -> None:
    (tree / "CITATION.cff").write_text("version: 1.1.0\n")
    assert list(problems_of_changelog(tree, "1.2.0")) == ["CITATION.cff has `version: 1.2.0`, got 1.1.0"]


def test_nothing_is_built_of_a_tree_with_problems(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr(release, "build", lambda root, folder: built.append(folder))
    monkeypatch.setattr(release, "archives", lambda folder, version: [])
    (tree / "dirt").touch()
    assert release.main([]) == 1
    assert built == []
    (tree / "dirt").unlink()
    assert release.main([]) == 0
    assert built == [tree / "dist"]
    said = capsys.readouterr().out
    assert "git tag --annotate v1.2.0" in said
    assert "  dist/nvidia_h200.kernels (not of this tree: make bundle)\n" in said


def test_a_bundle_of_this_tree_is_told_from_an_older_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "ROOT", tree)
    (tree / ".gitignore").write_text("dist\n")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "Ignore archives")
    (tree / "dist").mkdir()
    for path in release.bundle(tree / "dist"):
        path.touch()
    os.utime(tree / "dist/nvidia_h200.sqlite3", (1.0, 1.0))
    assert release.main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "  dist/nvidia_h200.kernels",
        "  dist/nvidia_h200.sqlite3 (not of this tree: make bundle)",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[docs](docs/README.md)", "got docs/README.md"),
        ("![chart](docs/img/a.png)", "got docs/img/a.png"),
        ("[docs][1]\n\n[1]: ./docs", "got ./docs"),
        ("| a |\n| - |\n| [x](y.md) |", "got y.md"),
        ("[docs](http://example.org)", "got http://example.org"),
        ("a <script>b</script>", "got <script>"),
        ("<details>\n\nhidden\n\n</details>", "got <details>"),
    ],
)
def test_what_an_index_shows_wrongly_is_refused(text: str, problem: str) -> None:
    assert problem in next(problems_of_description(text))


def test_the_readme_is_right_as_a_long_description() -> None:
    message = Message()
    message["Version"], message["Description-Content-Type"] = __version__, "text/markdown"
    for line in re.findall(r'^    "(.+ :: .+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE):
        message["Classifier"] = line
    message.set_payload((ROOT / "README.md").read_text())
    assert list(problems_of_metadata(message, __version__)) == []
    message["Classifier"] = "Topic :: Scientific/Engineering :: Artful Intelligence"
    assert len(list(problems_of_metadata(message, "9.9.9"))) == 2


def test_an_empty_description_of_no_kind_is_refused() -> None:
    message = Message()
    message["Version"] = "1"
    message.set_payload("")
    assert len(list(problems_of_metadata(message, "1"))) == 2


def test_workflows_call_make_targets_and_nothing_else() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = []
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        commands += [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert sorted(commands) == ["make gpu-test", "make sanitize", "make test"]
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE)


def test_issue_forms_have_what_such_forms_need() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            assert all({"name", "url", "about"} == set(link) for link in form["contact_links"])
            continue
        assert {"name", "description", "body"} <= set(form), path.name
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids))
        assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in form["body"])


def test_the_citation_has_what_the_format_needs_and_names_the_papers() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= set(cited)
    assert str(cited["version"]) == __version__
    for paper in cited["references"]:
        assert {"type", "title", "authors", "year"} <= set(paper)
        assert "url" in paper or "doi" in paper
    titles = " ".join(paper["title"] for paper in cited["references"])
    for word in ("FlashAttention:", "FlashAttention-2", "FlashAttention-3", "Online normalizer"):
        assert word in titles
