"""Only a family's own package and the table name a family: search, database, dispatcher and commands read the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "flashgen/codegen").glob("*/__init__.py"))
MIGRATIONS = ROOT / "flashgen/db/migrations/versions"
"""Of which each speaks of the rows of its time, whatever families there are now."""

FOREIGN = ROOT / "scripts/flash_attn_tests.py"
"""It names folders of FlashAttention, one of them after the architecture that a family is named after, too."""

OTHERS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("flashgen", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path.parent not in (*PACKAGES, MIGRATIONS) and path not in (ROOT / "flashgen/codegen/families.py", FOREIGN)
)
WORDS = {family.id.split("_")[0] for family in FAMILIES}
"""What ids begin with, so that a comparison with a beginning or a name that is put together is found as well."""

NAMED = re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(WORDS))})(?![a-z])", re.IGNORECASE)


def test_no_other_file_names_a_family() -> None:
    """In one test, since most files take less time than a test of their own would."""
    found = {name: [*named((ROOT / name).read_text())] for name in OTHERS}
    assert len(found) > 400
    assert not {name: places for name, places in found.items() if places}


def named(text: str) -> Iterator[tuple[int, str]]:
    """Lines that name a family or import from its package, comments and docstrings left out."""
    if not NAMED.search(text):  # most have none, not even in prose
        return
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in prose:
            yield from ((node.lineno, word) for word in words(node) if NAMED.search(word))


def words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.name for alias in node.names)
        yield getattr(node, "module", None) or ""


def test_every_family_has_a_package_and_the_test_reads_the_rest() -> None:
    assert {family.template.split("/")[0] for family in (*FAMILIES, *DECODE_FAMILIES)} == {
        path.name for path in PACKAGES
    }
    assert {"flashgen/tuning/predict.py", "flashgen/runtime/lookup/ladder.py", "scripts/crosscompile.py"} <= set(OTHERS)


@pytest.mark.parametrize(
    "text",
    [
        f"x = {FAMILIES[0].id!r}",
        f"from flashgen.codegen.{FAMILIES[0].template.split('/')[0]}.family import X",
        f"from flashgen.codegen import {FAMILIES[0].template.split('/')[0]}",
        f"x = family.id.startswith({FAMILIES[0].id.split('_')[0]!r})",
        f"{FAMILIES[0].id.upper()}",
    ],
)
def test_a_file_that_names_a_family_is_found(text: str) -> None:
    tree_text = text if text.startswith(("x", "from")) else f"print({text})"
    assert list(named(tree_text))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_family_imports_from_another_one(package: Path) -> None:
    """The import contract of pyproject.toml says so of those that it lists; this reads them all."""
    others = {path.name for path in PACKAGES} - {package.name}
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
                assert not imported & others, f"{path.name}:{node.lineno}"
