"""Packages of records: found without an import, below the user's database and above the shipped ones."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.db import layers as module
from flashgen.db import package_project, packages
from flashgen.db.exchange import export_records
from flashgen.db.layers import Layers
from flashgen.db.package_project import write_project
from flashgen.db.store import Store
from flashgen.runtime.lookup.ladder import resolve
from flashgen.runtime.lookup.records import Records
from tests.db.samples import CAUSAL, H200, MEASURED, SHORT, WIDE, timed

PACKAGED = timed(MEASURED, 1.4)


def install(folder: Path, name: str, *, text: str | None = None, package: str = "records_here") -> Path:
    """What pip leaves behind; returns where the database belongs."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(
        text or f"[console_scripts]\na = b:c\n\n[{packages.GROUP}]\n{name} = {package}\n"
    )
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    return folder / package / packages.FILE


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed projects on the path, and a shipped database below."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    export_records(
        [replace(timed(MEASURED, 1.9), workload=workload) for workload in (CAUSAL, SHORT, WIDE)],
        tmp_path / "shipped" / "nvidia_h200" / "records.sqlite3",
    )
    monkeypatch.setattr(module, "shipped", lambda _: tmp_path / "shipped")
    return site


def test_the_order_is_user_package_shipped(site: Path, tmp_path: Path) -> None:
    export_records([PACKAGED, replace(PACKAGED, workload=SHORT)], install(site, "demo"))
    user = tmp_path / "user.sqlite3"
    with Store.open(user) as store:
        store.put_record(MEASURED)
    with Layers.open([user]) as layers:
        assert [layer.name for layer in layers.layers] == [str(user), "packaged/demo", "shipped/nvidia_h200"]
        found = [layers.record(workload, H200) for workload in (CAUSAL, SHORT, WIDE)]
        assert [layer for _, layer in filter(None, found)] == [layer.name for layer in layers.layers]
        served = resolve(SHORT, SHORT.specialization, H200, Records(layers))
    assert (served.rung, served.layer) == (4, "packaged/demo")
    assert "records_here" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        f"[{packages.GROUP}]\ndemo = ../../etc\n",
        f"[{packages.GROUP}]\ndemo = records_here.sub\n",
        f"[{packages.GROUP}]\ndemo = records_here:records\n",
        f"[{packages.GROUP}]\nde\x1b[2Jmo = records_here\n",
        f"[{packages.GROUP}]\n{'x' * 99} = records_here\n",
        f"[{packages.GROUP}\ndemo = records_here\n",
        f"; {packages.GROUP}\n",
        "[other]\nflashgen.databases = records_here\n",
        "\0" * 100 + packages.GROUP,
    ],
)
def test_what_names_no_package_is_passed_over(text: str, site: Path) -> None:
    install(site, "demo", text=text)
    assert packages.installed([str(site), "", str(site / "none"), str(site / "archive.zip")]) == {}


def test_the_first_of_two_with_one_name_counts(tmp_path: Path) -> None:
    first = install(tmp_path / "a", "demo")
    install(tmp_path / "b", "demo")
    other = install(tmp_path / "b", "another", package="more")
    found = packages.installed([str(tmp_path / "a"), str(tmp_path / "b")])
    assert list(found.items()) == [("another", other), ("demo", first)]


@pytest.mark.parametrize("kind", ["missing", "damaged", "foreign"])
def test_a_bad_package_stops_nobody(site: Path, tmp_path: Path, kind: str) -> None:
    path = install(site, "demo")
    if kind != "missing":
        path.write_bytes(b"SQLite format 3\0" * 300 if kind == "damaged" else b"hello" * 999)
    with pytest.warns(UserWarning, match="packaged/demo is not used"), Layers.open([tmp_path / "none"]) as layers:
        assert [layer.name for layer in layers.layers] == ["shipped/nvidia_h200"]


def test_a_project_is_written_once_and_whole(tmp_path: Path) -> None:
    source = tmp_path / "mine.sqlite3"
    with Store.open(source) as store:
        store.put_records([MEASURED, replace(MEASURED, workload=SHORT)])
    folder = write_project("h200_models", source, tmp_path / "project", version="1.2")
    project = (folder / "pyproject.toml").read_text()
    assert 'name = "flashgen-records-h200-models"\nversion = "1.2"\n' in project
    assert f'[project.entry-points."{packages.GROUP}"]\nh200_models = "flashgen_records_h200_models"\n' in project
    with Store.open(folder / "flashgen_records_h200_models" / packages.FILE, shipped=True) as store:
        assert len(store.all_records()) == 2
    assert "| sm90-132sm-141gb | measured | 2 |" in (folder / "README.md").read_text()
    with pytest.raises(DatabaseError, match="a new folder"):
        write_project("h200_models", source, folder)


@pytest.mark.parametrize(
    ("name", "version", "rule"),
    [
        ("H200", "1.0", "a-z"),
        ("a/b", "1.0", "a-z"),
        ("a\nb", "1.0", "a-z"),
        ('a"', "1.0", "a-z"),
        ("", "1.0", "a-z"),
        ("a" * 41, "1.0", "at most 40"),
        ("a_", "1.0", "a-z"),
        ("good", '1.0"', "is like 1.0.0"),
        ("good", "latest", "is like 1.0.0"),
    ],
)
def test_a_project_has_a_name_and_a_version(name: str, version: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=rule):
        write_project(name, tmp_path / "mine.sqlite3", tmp_path / "project", version=version)
    assert not list(tmp_path.iterdir())


def test_nothing_is_packaged_of_a_file_without_valid_records(tmp_path: Path) -> None:
    source = tmp_path / "mine.sqlite3"
    with Store.open(source):
        pass
    with pytest.raises(DatabaseError, match="needs records"):
        write_project("demo", source, tmp_path / "project")
    assert not (tmp_path / "project").exists()


def test_drafts_of_killed_processes_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_records([MEASURED], tmp_path / "mine.sqlite3")
    seen: list[str] = []

    def export(records: object, path: Path) -> None:
        seen.extend(folder.name for folder in tmp_path.iterdir() if path.is_relative_to(folder))
        export_records([MEASURED], path)

    monkeypatch.setattr(package_project, "export_records", export)
    write_project("mine", tmp_path / "mine.sqlite3", tmp_path / "first")
    (draft,) = seen
    for name in (draft, "tmpother"):  # what a process leaves that is killed there, and what is not ours
        (tmp_path / name / "project").mkdir(parents=True)
        long_ago = time.time() - 2 * ABANDONED_SECONDS
        os.utime(tmp_path / name, (long_ago, long_ago))
    write_project("mine", tmp_path / "mine.sqlite3", tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["first", "second", "tmpother"]
