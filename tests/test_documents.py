"""Decisions have one form, pages that sources name exist, and CONTRIBUTING says what templates and launches get."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from flashgen.codegen import families
from flashgen.codegen import render as rendering
from flashgen.codegen.family import KernelFamily, Sizes
from flashgen.core import settings
from flashgen.core.device import find_device
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Specialization
from flashgen.db.layout import SCHEMA_VERSION
from flashgen.tuning.workloads import collect

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_is_one_page_that_says_was_is_and_why(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 45
    assert len(text.encode()) <= 4_000
    assert re.findall(r"^\*\*(Was|Is|Why)\.\*\* ", text, re.MULTILINE) == ["Was", "Is", "Why"]


def test_a_log_of_attempts_belongs_to_a_decision() -> None:
    for log in (ROOT / "docs/experiments").glob("*.md"):
        decision = ROOT / "docs/decisions" / log.name
        assert decision.is_file(), log.name
        assert f"(../experiments/{log.name}" in decision.read_text()
        assert f"(../decisions/{log.name}" in log.read_text()


SOURCES = ("flashgen", "templates", "scripts", "benchmarks", "tests", "examples")
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(found for name in ("docs", *SOURCES) for found in (ROOT / name).rglob("*.md")))
    if path != ROOT / "docs/supported.md"  # whose reasons are the families' own
)
OLD_WORDS = {"copy engine": "TMA", "matrix unit": "tensor cores", "multiprocessor": "SM"}


def test_pages_that_sources_name_exist() -> None:
    """Comments and docstrings lead to decisions and other pages by their path from the root."""
    found = 0
    for source in (path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".jinja")):
        for named in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text(encoding="utf-8")):
            found += 1
            assert (ROOT / named).is_file(), f"{source.relative_to(ROOT)} names {named}"
    assert found > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for old, word in OLD_WORDS.items():
        assert old not in text.lower(), f"{page.relative_to(ROOT)} says {old!r} instead of {word!r}"


def test_every_page_of_the_folder_is_in_its_list() -> None:
    listed = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs").iterdir():
        if path.name not in ("README.md", "img"):
            assert f"({path.name})" in listed, path.name


def test_every_schema_revision_is_in_the_table_of_databases() -> None:
    listed = re.findall(r"^\| (\d{4}) \| \w", (ROOT / "docs/databases.md").read_text(), re.MULTILINE)
    assert listed == [f"{revision:04d}" for revision in range(1, int(SCHEMA_VERSION) + 1)]


ANSWERS = ("faq", "coming-from", "deploying", "torch", "reference")
NAMED = re.compile(r"`flashgen\.([a-z_]+(?:\.[a-z_]+)*)|`FLASHGEN_([A-Z_]+)")


@pytest.mark.parametrize("page", ANSWERS)
def test_answers_name_functions_and_variables_that_exist(page: str) -> None:
    """`flashgen.attention(...)` and `FLASHGEN_DB`; commands and links have tests of their own."""
    found = NAMED.findall((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))
    for name, variable in found:
        if variable:
            assert f"FLASHGEN_{variable}" in (settings.__doc__ or ""), variable
        else:
            assert resolve_name(f"flashgen.{name}")
    assert len(found) > 1


SHIPPED = {
    "docs/decoding.md": ("are shipped for all presets of serving", ["serving"]),
    "docs/models.md": (
        "| records that ship | for these layers, and",
        ["llama-3.1-8b", "gemma-2-9b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v3", "flux", "sdxl", "vit-l"],
    ),
}
"""What a page says of shipped records, and the presets that it says it of."""


@pytest.mark.parametrize("page", SHIPPED)
def test_records_ship_for_the_presets_that_pages_name(page: str) -> None:
    sentence, models = SHIPPED[page]
    assert sentence in (ROOT / page).read_text(encoding="utf-8")
    shipped = set[str]()
    for path in (ROOT / "tuning_db").glob("*/records.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            shipped |= {row["workload"] for row in csv.DictReader(file)}
    assert [workload.key for workload in collect(models=models) if workload.key not in shipped] == []


def test_whole_models_of_transformers_are_said_to_be_unmeasured_while_they_are() -> None:
    measured = any((ROOT / "benchmarks/results").glob("*/models_transformers.csv"))
    assert ("**not measured**" in (ROOT / "docs/models.md").read_text(encoding="utf-8")) is not measured


# --- CONTRIBUTING ---------------------------------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
SPECIALIZATIONS = (
    "fwd-bf16-d128-causal",
    "fwd-bf16-d192-dv128-causal",
    "fwd-bf16-d128-causal-varlen-dropout",
    "fwd-bf16-d96-bias-mask",
    "fwd-fp32-d80-softcap-window-offset",
    "fwd-bf16-d192-causal-softcap-alibi-sink-bias-mask-window-scattered",
    "fwd-fp16-d64-alibi-keybias-keymask-window-unaligned",
)
MODS_ONLY = re.compile(r"D?Aux\d|Q?(Partial|Full)(Counts|Indices)|num_[qk]_blocks|stride_block_[bh]")
"""Names of calls with functions of the caller, which no key can ask for."""


def section(heading: str) -> str:
    return CONTRIBUTING.split(f"### {heading}\n")[1].split("\n#")[0]


def expanded(pattern: str) -> Iterator[str]:
    """`stride_{q,k}{b,h}` as the shell reads it."""
    # what lies between braces stands at odd places
    pieces = [piece.split(",") if n % 2 else [piece] for n, piece in enumerate(re.split(r"[{}]", pattern))]
    yield from map("".join, itertools.product(*pieces))


def first_column(text: str) -> set[str]:
    cells = (line.split("|")[1] for line in text.splitlines() if line.startswith("| ") and "`" in line)
    return {name for cell in cells for pattern in re.findall(r"`([^`]+)`", cell) for name in expanded(pattern)}


def parameters() -> Iterator[tuple[str, set[str]]]:
    """Names of parameters of default kernels, each with the names that pieces of scratch memory give."""
    sizes = Sizes(batch=2, nheads=8, nheads_k=2, seqlen_q=100, seqlen_k=300)
    for key, direction, name in itertools.product(SPECIALIZATIONS, ("forward", "backward"), ("h200", "a100")):
        spec = replace(Specialization.parse(key), direction=direction)
        if direction == "backward":
            spec = replace(spec, sink=False, sink_dtype="", bias_grad=bool(spec.bias))
        device = find_device(name)
        try:
            rows = families.applicable(spec, device)
        except UnsupportedError:
            continue
        for row in rows:
            config = row.default(spec, device)
            pieces = [piece.name for piece in row.scratch(spec, config, sizes)]
            scratch = {f"{piece}_desc" for piece in pieces} | {piece.title().replace("_", "") for piece in pieces}
            for kernel in row.kernels(spec, config):
                yield from ((parameter.name, scratch) for parameter in kernel.parameters)


def test_every_field_of_a_row_is_explained() -> None:
    documented = {name.split("(")[0] for name in first_column(section("The row"))}
    declared = {field.name for field in dataclasses.fields(KernelFamily)}
    assert documented == declared


def test_the_launch_vocabulary_is_that_of_the_families() -> None:
    documented = first_column(section("The launch vocabulary"))
    used = set()
    for name, scratch in parameters():
        assert name in documented | scratch, f"CONTRIBUTING.md does not say what {name} is bound to"
        used.add(name)
    unused = {name for name in documented - used if not MODS_ONLY.fullmatch(name)}
    assert unused == {"dq_acc"}, "a piece of scratch memory is no parameter, anything else that is documented is one"


def test_what_every_template_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, device = Specialization.parse("fwd-bf16-d128-causal"), find_device("h200")
    given: dict[str, Any] = {}
    original = rendering.render_template

    def spy(template: str, purpose: str, **values: object) -> str:
        given[template] = values
        return original(template, purpose, **values)

    monkeypatch.setattr(rendering, "render_template", spy)
    documented = first_column(section("What a template receives"))
    for row in families.applicable(spec, device):
        config = row.default(spec, device)
        rendering.render(spec, config)
        values = given[row.template]
        assert documented | {name for name, _ in config.knobs} <= values.keys()
        assert values["entry"] == row.id
    # what families have in common is either documented or about the call
    assert documented == {"entry", "title", "command", "kernels", "parameters", "do_not_specialize", "checks"}


def test_every_rendered_text_ends_with_its_launcher() -> None:
    for spec in (Specialization.parse("fwd-bf16-d128-causal"), Specialization.parse("bwd-bf16-d128-causal")):
        device = find_device("h200")
        for row in families.applicable(spec, device):
            text = rendering.render(spec, row.default(spec, device)).text
            *_, last = re.findall(r"^def (\w+)\(", text, re.MULTILINE)
            assert last == f"{row.id}_call"


def test_targets_that_contributing_names_are_phony() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    assert set(re.findall(r"^\| `make ([a-z-]+)`", CONTRIBUTING, re.MULTILINE)) <= set(phony)
