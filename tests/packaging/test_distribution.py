"""What is distributed: the source archive, the wheel built from it, and that wheel installed far from the checkout."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flashgen
from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.db.exchange import export_records
from scripts import release
from tests.db.samples import CAUSAL, MEASURED, PREDICTED, SHORT, timed
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "b1-h32-hk8-s1024-d128-causal"

# one group: the archives are built once, and by one worker
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("packaging")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archives:
    """The built files."""

    sdist: Path
    wheel: Path

    def sdist_names(self) -> set[str]:
        """Paths in the source archive, below its top folder."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}

    def wheel_names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """The sdist of this tree, and the wheel that is built from it (not from the tree)."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return Archives(sdist=sdist, wheel=wheel)


@pytest.fixture(scope="session")
def installed(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel and what it declares to need, and nothing else.

    What it needs is linked from the environment of the tests: what is declared is there, what is not is not, and nobody
    waits for torch to be unpacked once more. An index is not asked: pip refuses what the links do not satisfy.
    """
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    (own,) = importlib.metadata.distributions(path=[str(archives.wheel)])
    link(needed(own), packages)
    run(*pip_of(folder / "bin"), "install", "--quiet", "--no-index", str(archives.wheel), cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="session")
def extras(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with what the extras for bundles and clusters add to that environment."""
    (own,) = importlib.metadata.distributions(path=[str(archives.wheel)])
    folder = tmp_path_factory.mktemp("extras")
    base = {each.name for each in needed(own)}
    link([each for each in needed(own, "bundles", "ray") if each.name not in base], folder)
    return folder


def link(distributions: Iterable[importlib.metadata.Distribution], folder: Path) -> None:
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


def needed(distribution: importlib.metadata.Distribution, *extras: str) -> list[importlib.metadata.Distribution]:
    """What a distribution declares to need with these extras, and what that needs in turn, as installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = [distribution]
    while left:
        now = left.pop()
        asked = ("", *extras) if now is distribution else ("",)
        for requirement in map(Requirement, now.requires or ()):
            marker = requirement.marker
            wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in asked)
            if wanted and requirement.name not in found:
                found[requirement.name] = importlib.metadata.distribution(requirement.name)
                left.append(found[requirement.name])
    return list(found.values())


def pip_of(folder: Path) -> list[str]:
    """This environment's pip, working on another one."""
    return [sys.executable, "-m", "pip", "--python", str(folder / "python"), "--disable-pip-version-check"]


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Standard output of a command that must succeed, away from the checkout and its import path."""
    # what the first import compiles is kept for the next ones
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in left_out} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*folders: str) -> set[str]:
    """Files of the checkout below these folders, without caches."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_sdist_holds_all_that_is_needed_to_test_and_review(archives: Archives) -> None:
    names = archives.sdist_names()
    missing = tracked("flashgen", "templates", "tuning_db", "tests", "docs", "benchmarks", "examples") - names
    assert not {name for name in missing if not name.endswith(".pyc")}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints/cpu.txt"} <= names


def test_wheel_holds_package_templates_and_databases_only(archives: Archives) -> None:
    names = archives.wheel_names()
    assert tracked("flashgen") <= names
    assert {f"flashgen/_data/{name}" for name in tracked("templates", "tuning_db")} <= names
    assert "flashgen/py.typed" in names
    tops = {name.split("/", 1)[0] for name in names}
    assert tops == {"flashgen", f"flashgen-{flashgen.__version__}.dist-info"}


def test_what_a_package_index_shows_is_right(archives: Archives) -> None:
    for path in (archives.sdist, archives.wheel):
        message = release.metadata(path)
        assert message["Name"] == "flashgen"
        assert list(release.problems_of_metadata(message, flashgen.__version__)) == []
        addresses = dict(line.split(", ") for line in message.get_all("Project-URL"))
        assert {"Homepage", "Documentation", "Changelog", "Issues"} <= addresses.keys()
        assert all(address.startswith("https://") for address in addresses.values())
    names = [path.name for path in release.archives(archives.wheel.parent, flashgen.__version__)]
    assert names == [archives.sdist.name, archives.wheel.name]


def test_install_is_consistent_and_not_the_checkout(installed: Path) -> None:
    run(*pip_of(installed), "check", cwd=installed)
    code = "import flashgen; print(flashgen.__version__, flashgen.__file__)"
    version, file = run(str(installed / "python"), "-c", code, cwd=installed).split()
    assert version == flashgen.__version__
    assert Path(file).is_relative_to(installed.parent)


def test_installed_db_list_reads_the_shipped_databases(installed: Path) -> None:
    listed = run(str(installed / "flashgen"), "db", "list", cwd=installed)
    devices = [database.parent.name for database in (ROOT / "tuning_db").glob("*/records.sqlite3")]
    assert devices
    assert all(f"shipped/{device}" in listed for device in devices)


COMMANDS = """
import json, shlex, sys
from flashgen.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["flashgen", *shlex.split(line)]
    print("$", line, flush=True)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print("=", code, flush=True)
"""
"""Runs commands in one process: each start costs as much as most of them."""


def run_commands(installed: Path, folder: Path, expected: dict[str, str], **variables: str) -> dict[str, str]:
    """Run commands in one process; each ends with 0 and says some words. What each of them printed."""
    done = run(
        str(installed / "python"),
        "-c",
        COMMANDS,
        *expected,
        cwd=folder,
        FLASHGEN_DB=str(folder / "own.sqlite3"),
        FLASHGEN_CACHE_DIR=str(folder / "cache"),
        COLUMNS="300",
        **variables,
    )
    parts = dict(part.split("\n", 1) for part in done.split("$ ")[1:])
    assert list(parts) == list(expected)
    for command, words in expected.items():
        assert parts[command].endswith("= 0\n"), parts[command]
        assert words in parts[command], parts[command]
    return {command: text.removesuffix("= 0\n") for command, text in parts.items()}


@EXHAUSTIVE
def test_installed_commands_render_kernels_that_compile_as_python_and_name_the_rung_that_serves(
    installed: Path, tmp_path: Path
) -> None:
    decorators = {f"render {SHAPE} --target a100": "@triton.jit", f"render {SHAPE} --target h100": "@gluon.jit"}
    told = run_commands(installed, tmp_path, {**decorators, f"explain {SHAPE} --target h100": "portable_forward"})
    for command in decorators:
        compile(told[command], "rendered.py", "exec")
        assert "import flashgen" not in told[command]


@EXHAUSTIVE
def test_installed_commands_of_databases_do_their_work(installed: Path, tmp_path: Path) -> None:
    export_records([MEASURED, replace(MEASURED, workload=SHORT)], tmp_path / "a.sqlite3")
    export_records([timed(MEASURED, 0.9)], tmp_path / "b.sqlite3")
    expected = {
        "db verify a.sqlite3 b.sqlite3": "2 records",
        "db diff a.sqlite3 b.sqlite3": SHORT.key,
        "db merge a.sqlite3 b.sqlite3 -o c.sqlite3 --no-measure": "1 B",
        "db import a.sqlite3": "2 added, 0 replaced",
        f"db history {CAUSAL.key} --device h200": "own.sqlite3",
        "db export d.sqlite3": "2 records written to d.sqlite3",
        f"tune --target h100 --shard 1/2 --budget 1 --shape {SHORT.key} --dry-run": SHORT.key,
        "doctor": flashgen.__version__,
    }
    run_commands(installed, tmp_path, expected)
    assert {f"{name}.{kind}" for name in "cd" for kind in ("sqlite3", "csv")} <= {
        path.name for path in tmp_path.iterdir()
    }


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("zstandard", "ray"))), reason="the extras bundles and ray are not installed"
)
@EXHAUSTIVE
def test_installed_commands_of_extras_do_their_work(
    installed: Path, extras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)  # no bundle holds what a machine's settings made
    a100 = find_device("a100")
    config = default_config(SHORT.specialization, a100)
    export_records([replace(PREDICTED, workload=SHORT, device=a100, config=config)], tmp_path / "a.sqlite3")
    expected = {
        "db import a.sqlite3": "1 added",
        "db export b.sqlite3 --with-binaries --jobs 1": "2 kernels for sm80 by Triton",
        "db import b.sqlite3 --with-binaries": "taken over from b.kernels",
        "tune --ray local --target h100 --family portable_forward --jobs 1 --budget 1 --shape b1-h2-s128-d64": "[1/1]",
    }
    run_commands(installed, tmp_path, expected, PYTHONPATH=str(extras), RAY_USAGE_STATS_ENABLED="0")
    assert len(list((tmp_path / "cache" / "bundles").glob("*.kernel"))) == 2


@EXHAUSTIVE
def test_a_package_of_records_is_installed_beside_the_wheel_and_serves(installed: Path, tmp_path: Path) -> None:
    export_records([timed(MEASURED, 1.4)], tmp_path / "mine.sqlite3")
    run(str(installed / "flashgen"), "db", "package", "demo", "mine.sqlite3", cwd=tmp_path)
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "flashgen-records-demo"),
        cwd=tmp_path,
    )
    (wheel,) = (tmp_path / "dist").glob("flashgen_records_demo-1.0.0-*.whl")
    run(*pip_of(installed), "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=tmp_path)
    explained = run(
        *(str(installed / "flashgen"), "explain", CAUSAL.key, "--target", "h200"),
        cwd=tmp_path,
        FLASHGEN_DB=str(tmp_path / "none.sqlite3"),
    )
    assert "packaged/demo" in explained
