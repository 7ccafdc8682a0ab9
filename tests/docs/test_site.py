"""The site: built strictly without a network, and nothing in it is loaded from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
import flashgen.integrations.torch
from flashgen import flash_attn, flash_attn_interface, integrations
from scripts.site_links import REPOSITORY, rewritten
from tests.tiers import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import socket, sys
def refused(*given):
    raise OSError("a build of the site asks nobody")
socket.socket.connect = socket.getaddrinfo = refused
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)=[\"']?([^\"'\s>]+)", re.I
)
LINKED = re.compile(r"<link\b[^>]*>")

pytestmark = [
    pytest.mark.xdist_group("site"),
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra docs is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-W", "ignore", "-c", BUILD, str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def outside(text: str) -> list[str]:
    """What a page makes a browser load from elsewhere."""
    links = [match[0] for match in LINKED.finditer(text) if not re.search(r"rel=[\"']?(canonical|next|prev)", match[0])]
    found = LOADED.findall(text) + [href for link in links for href in re.findall(r"href=[\"']?([^\"'\s>]+)", link)]
    return [address for address in found if re.match(r"(?:[a-z]+:)?//", address, re.I)]


@EXHAUSTIVE
def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        relative = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (relative.with_name("index.html") if page.name == "README.md" else relative)).is_file(), page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert outside(page.read_text(encoding="utf-8")) == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), (
            style.name
        )


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<script defer src=//cdn.example/x.js></script>",
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link href="//fonts.example" rel="preconnect">',
        '<img alt="a" src="http://example/b.png">',
    ],
)
def test_what_is_loaded_from_elsewhere_would_be_found(text: str) -> None:
    assert len(outside(text)) == 1


def test_the_api_page_has_every_public_name_with_its_arguments(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    doors = [name for name in integrations.torch.__all__ if name != "Calls"]
    for name in {*flashgen.__all__, *doors} - {"__version__"}:
        assert re.search(rf'id="flashgen\.[\w.]*\b{name}"', text), f"docs/api.md has no {name}"
    for module in (flash_attn, flash_attn_interface):
        for function in [getattr(module, name) for name in module.__all__]:
            path = f"{function.__module__}.{function.__qualname__}"
            assert f'id="{path}"' in text, f"docs/api.md has no {path}"
    assert "softmax_scale" in text
    assert "Raises" in text


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("faq.md", "tuning.md#hard-data", "tuning.md#hard-data"),
        ("faq.md", "../SECURITY.md", f"{REPOSITORY}/blob/main/SECURITY.md"),
        ("README.md", "decisions", f"{REPOSITORY}/tree/main/docs/decisions"),
        ("README.md", "tutorials", "tutorials/README.md"),
        ("tutorials/model.md", "../reference.md", "../reference.md"),
        ("tutorials/model.md", "../../CONTRIBUTING.md#rules", f"{REPOSITORY}/blob/main/CONTRIBUTING.md#rules"),
        ("benchmarks.md", "../benchmarks/results", f"{REPOSITORY}/tree/main/benchmarks/results"),
        ("faq.md", "https://example.org/../x", "https://example.org/../x"),
    ],
)
def test_links_that_leave_the_folder_go_to_the_repository(page: str, link: str, target: str) -> None:
    assert rewritten(f"see [it]({link})", page) == f"see [it]({target})"
    code = f"```python\nx[0]({link})\n```"
    assert rewritten(code, page) == code
