"""The commit in a row: of a checkout, marked when files differ from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.provenance import commit_of
from flashgen.core.settings import settings


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    generated = ("README.md", "docs/benchmarks.md", "benchmarks/results/gpu/forward.csv")
    for name in ("code.py", *generated):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert commit_of(tmp_path) == commit
    for name in generated:
        (tmp_path / name).write_text("two\n")
    assert commit_of(tmp_path) == commit
    (tmp_path / "code.py").write_text("two\n")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_without_git_the_commit_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give it with --commit"):
        commit_of(tmp_path)


def test_only_generated_kernels_of_the_shipped_databases_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.provenance import serve_generated

    monkeypatch.setenv("FLASHGEN_POLICY", "fastest")
    serve_generated(None, tmp_path)
    assert settings().policy == "generated"
    assert [path.exists() for path in settings().db_layers] == [False]
    serve_generated(tmp_path / "mine.sqlite3", tmp_path)
    assert settings().db_layers == (tmp_path / "mine.sqlite3",)
