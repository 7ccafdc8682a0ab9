"""The README and the other pages say what is true: their example runs, their commands, options and tables exist."""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashgen
from benchmarks.markdown import RAW, REPOSITORY
from flashgen.cli.main import app
from flashgen.cli.tune import INTERRUPTED, NO_VALID_CANDIDATE
from flashgen.codegen.families import FAMILIES
from flashgen.core import settings
from flashgen.core.device import find_device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.tuning.workloads import collect

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMAND_LINE = (ROOT / "docs/command-line.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]


def example() -> str:
    """The first Python block of the README."""
    match = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert match, "README.md has a Python example"
    return match[1]


def run_example(tmp_path: Path, **env: str) -> str:
    script = tmp_path / "example.py"
    script.write_text(example())
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_is_on_the_first_screen() -> None:
    head = README[: README.index("Requirements:")]
    assert "pip install flashgen" in head
    assert "flashgen tune" in head
    assert len(example().splitlines()) <= 20


def test_the_first_screen_has_one_line_for_an_existing_program() -> None:
    first = README.splitlines()[:25]
    (call,) = (found for line in first if (found := re.match(r"flashgen\.integrate\((.+)\)  #", line)))
    inspect.signature(flashgen.integrate).bind(*call[1].split(", "))


def test_example_without_a_gpu_says_why(tmp_path: Path) -> None:
    out = run_example(tmp_path, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert out.startswith("not supported: no kernel family serves ")
    assert out.endswith(" on cpu: all of them run on GPUs\n")


@pytest.mark.gpu
def test_example_on_a_gpu_attends_and_explains(tmp_path: Path) -> None:
    out = run_example(tmp_path)
    assert "out (1, 32, 1024, 128) lse (1, 32, 1024)" in out
    assert any(family.id in out for family in FAMILIES)


def table(text: str, heading: str) -> dict[str, str]:
    """First and second column of the table below a heading."""
    rows = re.findall(r"^\| `?([^|`]+?)`? \| (.+?) \|$", text[text.index(heading) :].split("\n## ", 1)[0], re.MULTILINE)
    return {name: meaning for name, meaning in rows if not set(name) <= {"-"}}


def test_environment_variables_are_those_of_the_settings() -> None:
    documented = {name for name in table(COMMAND_LINE, "## Environment variables") if name.startswith("FLASHGEN_")}
    assert documented == set(re.findall(r"FLASHGEN_[A-Z_]+", settings.__doc__ or ""))


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names `make {target}`"


def links(text: str) -> list[tuple[str, str]]:
    """Target and anchor of every link and image of a page; code blocks have none."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)


@functools.cache
def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links: GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_resolve() -> None:
    for page in PAGES:
        for link, anchor in links(page.read_text()):
            if "://" not in link:
                target = page.parent / link if link else page
                assert target.exists(), f"{page.relative_to(ROOT)} links to {link}"
                assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)} links to {link}#{anchor}"


def test_links_of_the_readme_are_absolute_and_name_what_exists() -> None:
    """It is the page of the package index as well, where a relative link leads nowhere."""
    found = links(README)
    assert len(found) > 10
    for link, anchor in found:
        if not link:
            assert anchor in anchors(ROOT / "README.md")
            continue
        assert link.startswith("https://"), f"README.md links to {link}"
        match = re.fullmatch(rf"(?:{REPOSITORY}/(blob|tree)|({RAW.removesuffix('/main')}))/main/(.+)", link)
        assert match, f"README.md links to {link}, which is not below {REPOSITORY}"
        path = ROOT / match[3]
        assert path.is_dir() if match[1] == "tree" else path.is_file(), f"README.md links to {link}"


def test_the_addresses_of_the_package_are_those_of_the_readme() -> None:
    declared = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert declared["Homepage"] == REPOSITORY
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == declared.keys()
    for name in ("Documentation", "Changelog"):
        assert (ROOT / declared[name].removeprefix(f"{REPOSITORY}/blob/main/")).is_file()


def test_the_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 140
    assert len(README.encode()) <= 9_000


def commands() -> list[tuple[str, str]]:
    """Every `flashgen ...` line of a code block or code span, with the page that has it."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        lines += re.findall(r"`(flashgen [^`]+)`", text)
        found |= {(page.name, line.split("#")[0].strip()) for line in lines if line.startswith("flashgen ")}
    return sorted(found)


@functools.cache
def help_text(*path: str) -> str:
    """What `flashgen <path> --help` prints."""
    plain = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    shown = CliRunner().invoke(app, [*path, "--help"], env=plain)
    assert shown.exit_code == 0, shown.output
    return shown.stdout


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_exist_with_the_options_that_pages_give(page: str, line: str) -> None:
    words = line.split()[1:]
    shown = help_text(*words[: 2 if words[0] == "db" else 1])
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", shown), f"{page}: {line}"


def test_commands_name_models_shapes_and_gpus_that_there_are() -> None:
    """What stands for the reader's own has `<`, `$` or `...`."""
    read = {"--model": lambda name: collect(models=[name]), "--shape": Workload.parse, "--target": find_device}
    found = 0
    for page, line in commands():
        for option, value in re.findall(r"(--model|--shape|--target) ([^\s<$.][^\s<$]*)(?= |$)", line):
            found += 1
            try:
                read[option](value)
            except FlashgenError as error:
                pytest.fail(f"{page}: {line}: {error}")
    assert found > 30


def test_exit_codes_are_those_of_the_command() -> None:
    shown = help_text()
    codes = [code for code in table(COMMAND_LINE, "## Exit codes") if code.isdigit()]
    # each is met by a test: 0, 1, 2 and 130 in tests/cli/test_main.py, 3 in tests/cli/test_tune.py
    assert set(codes) == {"0", "1", "2", str(NO_VALID_CANDIDATE), str(INTERRUPTED)}
    for code in codes:
        assert re.search(rf"\b{code}\b", shown), f"`flashgen --help` does not explain exit code {code}"
