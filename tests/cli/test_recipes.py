"""The recipes of docs/many-machines.md, with shells of this machine in place of ssh, scp and SLURM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.core.settings import child_environment, settings
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from tests.cli.conftest import ROOT
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200

SHAPES = ("b1-h8-s512-d64", "b1-h8-s1024-d64")
FEW = f"--shape {SHAPES[0]} --shape {SHAPES[1]} --budget 1 --family portable_forward --finals-rounds 1 --json"
RECIPES = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "many-machines.md").read_text(), re.DOTALL)
TASKS = {"SLURM_ARRAY_TASK_COUNT": "2"}
SHIMS = {
    "flashgen": f'exec {sys.executable} -m tests.cli.fake_command "$@"',
    "ssh": 'mkdir -p "$1" && cd "$1" && shift && exec sh -c "$*"',
    "scp": 'exec cp "$(echo "$1" | tr : /)" "$2"',
}


def recipe(*words: str) -> str:
    (found,) = [text for text in RECIPES if all(word in text for word in words)]
    return found.replace("--model all", FEW)


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds the shims."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in SHIMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return child_environment(PATH=f"{folder}:{child_environment()['PATH']}", PYTHONPATH=paths)


def run(text: str, folder: Path, environment: dict[str, str]) -> None:
    subprocess.run(["bash", "-euc", text], cwd=folder, env=environment, check=True, timeout=120)


@EXHAUSTIVE
def test_the_recipe_for_ssh(tmp_path: Path, shell: dict[str, str]) -> None:
    run(recipe("ssh"), tmp_path, shell)
    with Store.open(settings().db_layers[0], read_only=True) as store:
        assert all(store.record(Workload.parse(shape), H200) for shape in SHAPES)
    for index in range(2):  # each host has done its own part
        with Store.open(tmp_path / f"gpu{index + 1}" / f"part{index}.sqlite3", read_only=True) as store:
            assert [record.workload for record in store.records()] == [Workload.parse(SHAPES[index])]


def test_the_recipe_for_arrays_of_slurm(tmp_path: Path, shell: dict[str, str]) -> None:
    (tmp_path / "bin" / "flashgen").write_text('#!/bin/sh\necho "$*" >> asked\n')
    for index in range(2):
        run(recipe("SLURM_ARRAY_TASK_ID"), tmp_path, {**shell, "SLURM_ARRAY_TASK_ID": str(index), **TASKS})
    asked = [f"tune {FEW} --shard {index}/2 --db part{index}.sqlite3" for index in range(2)]
    assert (tmp_path / "asked").read_text().splitlines() == asked


def test_every_recipe_is_a_script() -> None:
    for text in RECIPES:
        subprocess.run(["bash", "-n", "-c", text], check=True, timeout=20)
