"""What a shell is offered at the tab key: commands, options and names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli.main import app


def offered(line: str) -> list[str]:
    """What bash is offered behind `line`, whose last word is not complete."""
    env = {"_FLASHGEN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = CliRunner().invoke(app, [], prog_name="flashgen", env=env)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("flashgen do", ["doctor"]),
        ("flashgen db ver", ["verify"]),
        ("flashgen tune --mod", ["--model"]),
        ("flashgen tune --model gpt", ["gpt2", "gpt2-packed", "gpt2-training", "gpt-oss-20b", "gpt-oss-20b-decode"]),
        ("flashgen tune --model train", ["training"]),
        ("flashgen tune --direction b", ["backward", "both"]),
        ("flashgen tune --family portable_f", ["portable_forward"]),
        ("flashgen tune --target h", ["h100", "h100_pcie", "h200"]),
        ("flashgen render b1-h1-s64-d64 --family hopper_f", ["hopper_forward"]),
        ("flashgen compile b1-h1-s64-d64 --target rtx_4", ["rtx_4090"]),
        ("flashgen db list --device mi", ["mi300x"]),
        ("flashgen db list --provenance m", ["measured"]),
        ("flashgen tune --model nothing-like-it", []),
    ],
)
def test_names_are_completed(line: str, names: list[str]) -> None:
    assert sorted(offered(line)) == sorted(names)


def test_every_name_that_is_offered_is_taken() -> None:
    from flashgen.core.device import find_device
    from flashgen.tuning.workloads import collect

    assert len(offered("flashgen tune --target ")) >= 12
    for name in offered("flashgen tune --target "):
        find_device(name)
    assert collect(models=offered("flashgen tune --model "))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_the_script_for_bash_is_one(tmp_path: Path) -> None:
    env = {"_FLASHGEN_COMPLETE": "source_bash"}
    script = CliRunner().invoke(app, [], prog_name="flashgen", env=env).stdout
    (tmp_path / "script").write_text(script)
    line = ["bash", "-c", f". {tmp_path}/script && complete -p flashgen"]
    assert "flashgen" in subprocess.run(line, capture_output=True, text=True, check=True).stdout
